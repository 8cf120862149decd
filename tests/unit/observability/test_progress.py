"""Progress of a run: what the display and the lines say, at any width, and that long phases move."""

from __future__ import annotations

import io
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from rlplug.interfaces import StepRecord
from rlplug.observability import progress as progress_module
from rlplug.observability.phase_progress import PHASE_PROGRESS, PhaseProgress
from rlplug.observability.progress import RLProgressBar, RunProgress, clock, display


@pytest.fixture(autouse=True)
def fresh_phase() -> Any:
    yield
    PHASE_PROGRESS.begin("starting")


def rendered(progress: RunProgress, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, markup=False).print(display(progress))
    return out.getvalue().splitlines()


NUMBERS = st.integers(0, 10**6)


@settings(max_examples=150)
@given(
    width=st.sampled_from([40, 80, 100, 200]),
    steps=NUMBERS,
    total=NUMBERS,
    done=NUMBERS,
    tokens=NUMBERS,
    counts=st.booleans(),
)
def test_the_display_fits_any_width(width: int, steps: int, total: int, done: int, tokens: int, counts: bool) -> None:
    """Catches a line that is wider than the terminal, which would wrap and leave copies of itself behind."""
    progress = RunProgress(total_steps=total, step=min(steps, total))
    progress.end_step(
        min(steps, total), {"reward/mean": 0.4, "time/step": 1.0, "time/rollout": 0.9, "time/update": 0.1}
    )
    PHASE_PROGRESS.begin("rollout")
    PHASE_PROGRESS.expect(total if counts else None, "completions")
    PHASE_PROGRESS.advance(done, tokens)
    lines = rendered(progress, width)
    assert len(lines) == (3 if total else 2)
    assert all(cell_len(line) <= width for line in lines)
    if width >= 80:
        assert "…" not in "".join(lines)


@pytest.mark.parametrize("width", [80, 100])
def test_the_display_says_where_the_run_is(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = RunProgress(total_steps=160, step=11)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 10)
    progress.end_step(12, {"reward/mean": 0.412, "completion/length_mean": 4.0})
    PHASE_PROGRESS.begin("rollout")
    PHASE_PROGRESS.expect(512, "completions")
    PHASE_PROGRESS.advance(300, 40_000)
    PHASE_PROGRESS.in_call(12, 2_000)
    monkeypatch.setattr(time, "monotonic", lambda: now + 20)
    run, phase, status = rendered(progress, width)
    assert run.split()[:2] == ["step", "12/160"]
    assert run.endswith("24:30 left")  # 148 steps of 10 s, 10 s of them gone
    assert phase.split()[:3] == ["rollout", "312/512", "completions"]
    assert phase.endswith("4,200 tokens/s  0:10")
    assert status.rstrip() == "reward 0.412 | length 4.0 |"


def test_turns_inside_a_call_are_no_trajectories() -> None:
    counter = PhaseProgress()
    counter.expect(8, "trajectories", counts_calls=False)
    counter.in_call(8, 100)
    assert (counter.state.num_done, counter.state.num_tokens) == (0, 100)
    counter.advance(9)
    assert counter.state.num_done == 8


def test_a_long_phase_has_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a log that is silent while a rollout takes an hour, and one that a fast run floods."""
    monkeypatch.setattr(progress_module, "LINE_S", 0.2)
    module = SimpleNamespace(
        plan=SimpleNamespace(total_steps=100), rollout_step=0, timer=SimpleNamespace(on_enter=None)
    )
    batch: Any = None
    bar: Any = RLProgressBar()
    streams = sys.stdout, sys.stderr
    bar.setup(SimpleNamespace(is_global_zero=True), module, "fit")
    PHASE_PROGRESS.begin("engine start")
    assert bar._progress.line.startswith("engine start, 0:")
    bar.on_train_start(None, module)
    module.timer.on_enter("rollout")
    PHASE_PROGRESS.expect(512, "completions")
    PHASE_PROGRESS.advance(44, 1000)
    time.sleep(0.5)
    for step in range(1, 31):
        bar.step_ended(StepRecord(step, {}, (), batch, {}))
    bar.on_train_end(None, module)
    assert (sys.stdout, sys.stderr) == streams
    lines = capsys.readouterr().err.splitlines()
    waiting = [line for line in lines if "rollout 44/512 completions" in line]
    assert 1 <= len(waiting) <= 3
    assert "tokens/s" in waiting[0]
    assert [line.split()[1] for line in lines if line not in waiting] == ["10/100", "20/100", "30/100"]


def test_durations() -> None:
    assert [clock(seconds) for seconds in (-3, 0.4, 61, 36_062)] == ["0:00", "0:00", "1:01", "10:01:02"]
