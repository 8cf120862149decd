"""Sources with one mistake each, the plain one first, which ``test_task_sabotage.py`` runs through their kit."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from rlplug_devkit import DataSourceConformance

from rlplug.data.prompt_stream import PromptStream
from rlplug.data.sources import AllRows, PromptRow, PromptSource
from rlplug.errors import ConfigError


class Rows(PromptSource):
    """Ten rows, unless the path is wrong."""

    def __init__(self, path: str = "here") -> None:
        self.path = path

    def rows(self) -> Any:
        if self.path != "here":
            raise ConfigError(f"{self.path} is not there: give here.")
        for index in range(10):
            yield self.row(index)

    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", f"{index}>", str(index), {})


class Empty(Rows):
    def rows(self) -> Any:
        if self.path != "here":
            raise ConfigError("not there")
        yield from ()


class HalvesOfPairs(Rows):
    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", "a\ud800" if index == 4 else "b", None, {})


class MixesForms(Rows):
    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", [{"role": "user", "content": "a"}] if index == 4 else "b", None, {})


class EmptyPrompts(Rows):
    def row(self, index: int) -> Any:
        return PromptRow(f"rows:{index}", "", None, {})


class OneUid(Rows):
    def row(self, index: int) -> Any:
        return PromptRow("rows", f"{index}>", None, {})


class Shuffles(Rows):
    def rows(self) -> Iterator[Any]:
        found = list(super().rows())
        random.Random(time.perf_counter_ns()).shuffle(found)
        return iter(found)


class KeepsItsPlace(Rows):
    place = 0

    def rows(self) -> Any:
        list(super().rows())
        self.place = 0
        while self.place < 10:
            self.place += 1
            yield self.row(self.place - 1)


class ForgetsItsPlace(Rows):
    """A source whose training prompts begin anew, whatever place was saved."""

    def for_training(self, key: str, name: str = "") -> AllRows:
        return RowsWithoutPlace(self, key, name)


class RowsWithoutPlace(AllRows):
    def prompts(self, encoder: Any, shuffle: bool, seed: int | str) -> PromptStream:
        return PromptsWithoutPlace(encoder.usable("data.train", self.known), shuffle, seed)


class PromptsWithoutPlace(PromptStream):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({**state, "epoch": 0, "position": 0})


class ReturnsAList(Rows):
    def rows(self) -> Any:
        return list(super().rows())


class SeedsGlobally(Rows):
    def rows(self) -> Any:
        random.seed(0)
        return super().rows()


class RaisesKeyErrors(Rows):
    def rows(self) -> Any:
        if self.path != "here":
            raise KeyError(self.path)
        return super().rows()


class SourceChecks(DataSourceConformance):
    source: ClassVar[type[Rows]]

    def make_source(self) -> PromptSource:
        return self.source()

    def make_broken_source(self) -> PromptSource:
        return self.source("elsewhere")
