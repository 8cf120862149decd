"""A long run does not grow: host memory at its end is what it was after ten steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import SMALL, Job, run_job, samples

from rlplug.observability.metrics_log import read_metrics

pytestmark = pytest.mark.nightly  # half a minute

MIB_PER_GIB = 1024


@pytest.mark.parametrize("num_steps", samples((80, 200), 80))
def test_steps_grow_by_less_than_20_mib(tmp_path: Path, num_steps: int) -> None:
    run = ["--model.num_steps", str(num_steps), "--run.dir", str(tmp_path / "run"), "--checkpoint.every_n_steps", "50"]
    result = run_job(Job([*SMALL, *run]), tmp_path / "log")
    assert result.exit_code == 0, result.message
    rows = read_metrics(tmp_path / "run/001/metrics.jsonl")
    resident = [row["memory/publish"] * MIB_PER_GIB for row in rows]
    assert len(resident) == num_steps
    assert max(resident[-20:]) - resident[9] < 20
