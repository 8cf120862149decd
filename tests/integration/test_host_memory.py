"""A long run does not grow: host memory after 200 steps is what it was after ten."""

from __future__ import annotations

import csv
from pathlib import Path

from command_line import SMALL, Job, run_jobs

MIB_PER_GIB = 1024


def test_200_steps_grow_by_less_than_20_mib(tmp_path: Path) -> None:
    run = ["--model.num_steps", "200", "--run.dir", str(tmp_path / "run"), "--checkpoint.every_n_steps", "50"]
    result = run_jobs({"long": Job([*SMALL, *run])}, tmp_path)["long"]
    assert result.exit_code == 0, result.message
    with (tmp_path / "run" / "001" / "metrics.csv").open(newline="") as file:
        resident = [float(row["memory/publish"]) * MIB_PER_GIB for row in csv.DictReader(file)]
    assert len(resident) == 200
    assert max(resident[-20:]) - resident[9] < 20
