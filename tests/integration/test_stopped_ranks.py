"""Two ranks of which one is told to stop, or killed: both end alike, and the run goes on from what was saved."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import SMALL, Job, run_job, samples

RUN = [*SMALL, "--model.num_steps", "4", "--trainer.devices", "2"]
TOLD = [("SIGTERM", 0, "rewards"), ("SIGTERM", 1, "rollout"), ("SIGINT", 1, "update"), ("SIGINT", 0, "rollout")]
STATUS = {"SIGTERM": 143, "SIGINT": 130}
NAMES = {"SIGTERM": "SIGTERM", "SIGINT": "Ctrl-C"}


@pytest.mark.nightly
@pytest.mark.parametrize(("signal", "rank", "phase"), TOLD)
def test_a_signal_to_one_rank_saves_and_ends_both(tmp_path: Path, signal: str, rank: int, phase: str) -> None:
    disturbance = {"signal": signal, "rank": rank, "phase": phase, "step": 2}
    stopped = run_job(Job([*RUN, "--run.dir", str(tmp_path)], disturbance, num_ranks=2), tmp_path / "log", 120)
    assert stopped.exit_code == [STATUS[signal]] * 2, stopped.output[-3000:]
    assert stopped.output.count("finishing the phase, then saving") == 1
    num_done = 2 if phase == "update" else 1
    assert f"Stopped after step {num_done} of 4" in stopped.message
    record = json.loads((tmp_path / "001" / "run.json").read_text())
    assert record["message"] == f"stopped by {NAMES[signal]} after step {num_done}"
    resumed = run_job(Job(["fit", "--resume", str(tmp_path / "001")], num_ranks=2), tmp_path / "log", 120)
    assert resumed.exit_code == [0, 0], resumed.output[-3000:]


@pytest.mark.parametrize("rank", samples((0, 1), 1))
def test_a_killed_rank_ends_the_other_with_one_message(tmp_path: Path, rank: int) -> None:
    disturbance = {"signal": "SIGKILL", "rank": rank, "phase": "rewards", "step": 2}
    killed = run_job(Job([*RUN, "--run.dir", str(tmp_path)], disturbance, num_ranks=2), tmp_path / "log", 120)
    assert killed.exit_code == ([-9, 1] if rank == 0 else [1, -9]), killed.output[-3000:]
    output = killed.output if rank else Path(f"{tmp_path / 'log'}.1").read_text()
    assert len(re.findall(rf"rank {rank}, (process \d+|or torchrun's agent), has ended, and this one", output)) == 1
    assert "Traceback" not in output


@pytest.mark.nightly
def test_rank_0_that_started_the_other_ends_it_too(tmp_path: Path) -> None:
    disturbance = {"signal": "SIGTERM", "phase": "rollout", "step": 2}
    stopped = run_job(Job([*RUN, "--run.dir", str(tmp_path)], disturbance), tmp_path / "log", 120)
    assert stopped.exit_code == 143, stopped.output[-3000:]
    assert stopped.output.count("finishing the phase, then saving") == 1
