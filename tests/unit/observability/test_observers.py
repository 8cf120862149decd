"""The observers of a run as one: who takes part, what each sees, and whose an error is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import ObservedRun, RunObserver, ScrapeTargets
from rlplug.observability.observers import Observers

RUN = ObservedRun(Path("runs/a/001"), "fit", is_first_rank=True, report=True)
ALONE: Any = SimpleNamespace(gather=list)


class Notes(RunObserver):
    """Notes what it sees in a list that observers share."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def begin(self, run: ObservedRun) -> None:
        self.seen.append(f"{self.name} begins {run.folder}")

    def engine_started(self, targets: ScrapeTargets | None) -> None:
        self.seen.append(f"{self.name} sees {None if targets is None else targets.urls}")

    def ended(self) -> list[str]:
        return [f"{self.name} ended"]


class NotingCallback(Callback, Notes):
    """Callback of Lightning's that is an observer too."""


class Refuses(RunObserver):
    def begin(self, run: ObservedRun) -> None:
        raise ConfigError("port 9400 is taken")


def test_callbacks_come_before_what_plugins_give_and_others_take_no_part() -> None:
    seen: list[str] = []
    observers = Observers([Callback(), NotingCallback("callback", seen)], [Notes("plugin", seen)], ALONE)
    observers.begin(RUN)
    assert seen == ["callback begins runs/a/001", "plugin begins runs/a/001"]
    assert observers.ended() == ["callback ended", "plugin ended"]


def test_an_engine_is_shown_once_and_again_when_its_servers_have_changed() -> None:
    """Of an engine without servers too, which every step asks about."""
    seen: list[str] = []
    observers = Observers([], [Notes("a", seen)], ALONE)
    first, second = ScrapeTargets("vLLM", ("http://a",), False), ScrapeTargets("vLLM", ("http://b",), False)
    for targets in (None, None, first, first, second):
        observers.engine_started(targets)
    assert seen == ["a sees None", "a sees ('http://a',)", "a sees ('http://b',)"]


def test_what_one_rank_refuses_ends_the_run_on_all() -> None:
    others: Any = SimpleNamespace(gather=lambda mine: [*mine, "port 9401 is taken"])
    with pytest.raises(ConfigError, match="port 9400 is taken"):
        Observers([], [Refuses()], ALONE).begin(RUN)
    with pytest.raises(ConfigError, match="port 9401 is taken"):
        Observers([], [Notes("a", [])], others).begin(RUN)


def test_a_plugin_that_gives_another_thing_is_named() -> None:
    with pytest.raises(RunError, match=r"Path.* must be a RunObserver, to observe a run; it is PosixPath"):
        Observers([], [Path("a")], ALONE)
