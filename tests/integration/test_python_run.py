"""A run that is made in Python records what the command line's does, and keeps nothing of the steps that have ended."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked

from rlplug.observability.metrics_log import read_metrics

ROOT = Path(__file__).parents[2]
SMALL = ("--model.batch.prompts_per_step", "16", "--model.num_steps", "3", "--model.validation.every_n_steps", "2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of the quickstart's first steps from the command line, and of the same from Python."""
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "rlplug", "fit", "-c", "configs/quickstart.yaml", *SMALL]
    run_forked(
        [*command, "--model.validation.at_start", "false", "--run.dir", str(folder / "command")],
        cwd=ROOT,
        timeout=300,
        check=True,
    )
    script = [sys.executable, str(Path(__file__).with_name("train_quickstart.py")), str(folder)]
    run_forked(script, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, timeout=300, check=True)
    return {"command": folder / "command/001", "python": folder / "runs/default/001", "seen": folder / "seen.json"}


def rows(run: Path) -> list[dict[str, float]]:
    return read_metrics(run / "metrics.jsonl")


def seen(runs: dict[str, Path], kind: str) -> Any:
    return json.loads(runs["seen"].read_text())[kind]


def test_it_records_the_same(runs: dict[str, Path]) -> None:
    """It catches a recorder that only the command line starts. What needs a configuration in YAML is left out."""
    files = {name: {path.name for path in runs[name].iterdir()} for name in ("command", "python")}
    assert files["command"] - files["python"] == {"config.yaml", "checkpoints"}
    assert files["python"] - files["command"] == set()
    command, python = rows(runs["command"]), rows(runs["python"])
    assert [row["step"] for row in python] == [1, 2, 3]
    assert [row.keys() for row in command] == [row.keys() for row in python]
    for name in ("reward/mean", "policy/grad_norm", "validate/reward_mean"):
        assert [row.get(name) for row in python] == [row.get(name) for row in command]
    assert (runs["python"] / "samples.jsonl").read_text() == (runs["command"] / "samples.jsonl").read_text()


def test_an_observer_sees_each_step_once(runs: dict[str, Path]) -> None:
    found = seen(runs, "seen")
    assert [each[:2] for each in found] == [["step", 1], ["step", 2], ["validation", 2], ["step", 3]]
    for _, step, mean, of_values in (each for each in found if each[0] == "step"):
        assert mean == pytest.approx(of_values)
        assert mean == float(rows(runs["python"])[step - 1]["reward/mean"])


def test_samples_do_not_outlive_their_step(runs: dict[str, Path]) -> None:
    assert seen(runs, "alive") == [0, 0, 0]
