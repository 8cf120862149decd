"""The start of a run: its phases, what is said of them, and what torch.compile does meanwhile."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlplug.observability import start as start_module
from rlplug.observability.phase_progress import PHASE_PROGRESS
from rlplug.observability.start import FIRST_STEP, Compilation, StartTimer, start_line, watch_compilation


def test_phases_of_a_start_leave_no_second_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a phase that counts twice, and a start whose phases do not add up to its time."""
    clock = itertools.count(100.0, 10.0)
    monkeypatch.setattr(start_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))  # for this module alone
    monkeypatch.setattr(StartTimer, "process_began", 91.0)
    timer = StartTimer()
    for name in ("models", "engine start", "models", FIRST_STEP):
        timer.begin(name)
    assert PHASE_PROGRESS.state.name == FIRST_STEP
    timer.end()
    assert not timer.is_running
    assert timer.seconds == {"imports and configuration": 9, "models": 20, "engine start": 10, FIRST_STEP: 10}


def test_a_process_that_was_noted_began_in_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StartTimer, "process_began", None)
    start_module.note_process_start()
    timer = StartTimer()
    timer.end()
    assert timer.seconds["imports and configuration"] > 0.1  # torch alone took longer to import


@pytest.mark.parametrize(
    ("compilation", "end"),
    [
        (Compilation(0.0, 0, 0), ""),
        (Compilation(8.2, 0, 0), "; torch.compile 8 of it"),
        (Compilation(20.4, 3, 1), "; torch.compile 20 of it: 3 graphs from the cache, 1 compiled"),
    ],
)
def test_a_start_is_said_in_one_line(compilation: Compilation, end: str) -> None:
    phases = {"imports and configuration": 9.0, "data": 0.1, "engine start": 37.2, FIRST_STEP: 27.0}
    step = {"time/step": 27.0, "time/rollout": 5.0, "time/update": 21.6, "time/prompts": 0.4, "reward/mean": 1.0}
    line = "started in 73 s: imports and configuration 9, engine start 37, first step 27 (rollout 5, update 22)"
    assert start_line(phases, step, compilation) == line + end


def test_compilation_is_seen_while_it_runs() -> None:
    """Catches a torch whose callbacks or counters have other names: the display would not say that it compiles."""
    seen: list[float | None] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(PHASE_PROGRESS.state.compiling_s)
        return graph.forward

    watch_compilation()
    watch_compilation()
    before = Compilation.so_far()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert len(seen) == 1
    assert seen[0] is not None
    assert PHASE_PROGRESS.state.compiling_s is None
    assert Compilation.so_far().seconds > before.seconds
