"""Correct sources of unusual style, which the kit must not refuse."""

from __future__ import annotations

import itertools
import math
import sqlite3
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
from simple_sources import SourceChecks

from rlplug.data.sources import AllRows, PromptRow, PromptSource
from rlplug.errors import ConfigError


def make_row(index: int) -> PromptRow:
    return PromptRow(f"rows:{index}", f"{index}>", str(index), {"level": index % 3})


class Mapped(PromptSource):
    """An iterator of C."""

    def rows(self) -> Any:
        return map(make_row, range(10))


class Held(PromptSource):
    """Yields the same objects to every reader."""

    def __init__(self) -> None:
        self.held = [make_row(index) for index in range(10)]

    def rows(self) -> Any:
        return iter(self.held)


@dataclass(frozen=True)
class FrozenRows(PromptSource):
    size: int = 10
    answers: tuple[Any, ...] = (np.arange(3), {"a", "b"}, 2 + 1j, None)

    def rows(self) -> Any:
        yield from (PromptRow(f"{i}", f"{i}>", self.answers[i % 4], {}) for i in range(self.size))


class Counting:
    """An iterator of its own class, without annotations."""

    def __init__(self, source):
        self.source, self.index = source, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.index == self.source.size:
            raise StopIteration
        self.index += 1
        return make_row(self.index)


class Counted(PromptSource):
    size = 10

    def rows(self):
        return Counting(self)


class Endless(PromptSource):
    """Never ends, and says in ``for_training`` which rows a training takes."""

    def rows(self) -> Any:
        return map(make_row, itertools.count())

    def for_training(self, key: str, name: str = "") -> AllRows:
        return AllRows(Mapped(), key, name)


class OneRow(PromptSource):
    """A single task, of messages; its constructor refuses what is not there."""

    def __init__(self, path: str = "here") -> None:
        if path != "here":
            raise ConfigError(f"data.train: {path} is not there: give here.")

    def rows(self) -> Any:
        with tempfile.TemporaryFile("w+") as file:
            file.write("one")
            file.seek(0)
            yield PromptRow(file.read(), [{"role": "user", "content": "1 + 1 ="}], "2", {})


class OfADatabase(PromptSource):
    """Its connection belongs to the thread that made it, and some of its values are NaN."""

    def __init__(self) -> None:
        self.tasks = sqlite3.connect(":memory:")
        self.tasks.execute("create table tasks (number integer)")
        self.tasks.executemany("insert into tasks values (?)", [(number,) for number in range(10)])

    def rows(self) -> Any:
        for (number,) in self.tasks.execute("select number from tasks order by number"):
            metadata = {"share": math.nan, "shares": np.array([number, math.nan])}
            yield PromptRow(f"tasks/{number}", "x" * (1 + number), str(number), metadata)


class UnusualSourceChecks(SourceChecks):
    def make_broken_source(self) -> Any:
        return None


class MappedChecks(UnusualSourceChecks):
    source = Mapped  # type: ignore[assignment]


class HeldChecks(UnusualSourceChecks):
    source = Held  # type: ignore[assignment]


class FrozenRowsChecks(UnusualSourceChecks):
    source = FrozenRows  # type: ignore[assignment]


class CountedChecks(UnusualSourceChecks):
    source = Counted  # type: ignore[assignment]


class EndlessChecks(UnusualSourceChecks):
    source = Endless  # type: ignore[assignment]


class OneRowChecks(UnusualSourceChecks):
    source = OneRow  # type: ignore[assignment]

    def make_broken_source(self) -> Any:
        return OneRow("elsewhere")


class OfADatabaseChecks(UnusualSourceChecks):
    source = OfADatabase  # type: ignore[assignment]
