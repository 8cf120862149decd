"""``scripts/compare_checkouts.py``: two recorded runs that are equal, and each way in which one can differ."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import run_forked
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.nightly  # of a script for maintainers

SCRIPT = Path(__file__).parents[2] / "scripts/compare_checkouts.py"
COLUMNS = ("step", "loss", "policy/grad_norm", "time/step", "memory/update", "sync/seconds", "throughput/tokens_per_s")


def record(folder: Path, clock: float = 1.0) -> None:
    """Write what a quickstart of two steps leaves; what depends on the clock is ``clock``."""
    run = folder / "quickstart/001"
    (run / "policy").mkdir(parents=True)
    rows = [[1, 0.25, 0.5, *[clock] * 4], [2, 0.125, 0.5, *[clock] * 4]]
    lines = [json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n" for row in rows]
    (run / "metrics.jsonl").write_text("".join(lines))
    (run / "samples.jsonl").write_text('{"step": 1}\n')
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, run / "policy/model.safetensors")
    about = {"commit": folder.name, "changed files": [], "versions": {"torch": "2"}}
    (folder / "record.json").write_text(json.dumps({"quickstart": about}))


def compare(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "compare", tmp_path / "before", tmp_path / "after"]
    return run_forked(command, timeout=120)


def edit(run: Path, file: str, old: str, new: str) -> None:
    text = (run / file).read_text()
    assert old in text
    (run / file).write_text(text.replace(old, new))


def change_weight(run: Path, name: str, value: torch.Tensor) -> None:
    file = run / "policy/model.safetensors"
    weights = {key: tensor.clone() for key, tensor in load_file(file).items()}
    save_file({**weights, name: value}, file)


def test_runs_that_differ_in_the_clock_alone_are_equal(tmp_path: Path) -> None:
    record(tmp_path / "before")
    record(tmp_path / "after", clock=2.0)

    done = compare(tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "| quickstart | 2 | 2 | 3 | 1 | 2 | equal |" in done.stdout
    assert "columns left out: memory/update, sync/seconds, throughput/tokens_per_s, time/step\n" in done.stdout
    assert "before: before, torch 2" in done.stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: edit(run, "metrics.jsonl", "0.125", "0.12500000000000003"), "loss, first in row 2: 0.125 and"),
        (lambda run: edit(run, "metrics.jsonl", "loss", "policy/loss"), "only before: loss"),
        (lambda run: edit(run, "samples.jsonl", "1", "2"), "samples.jsonl differs"),
        (lambda run: change_weight(run, "a", -torch.zeros(2, 3)), "a: 0 of 6 elements differ in value"),
        (lambda run: change_weight(run, "b", torch.ones(4)), "b: torch.bfloat16 (4,) and torch.float32 (4,)"),
        (lambda run: change_weight(run, "c", torch.ones(1)), "weights on one side only: c"),
        (lambda run: (run.parents[1] / "record.json").write_text("{}"), "recorded on one side only"),
    ],
)
def test_each_difference_is_told(tmp_path: Path, change: Callable[[Path], None], said: str) -> None:
    record(tmp_path / "before")
    record(tmp_path / "after")
    change(tmp_path / "after/quickstart/001")

    done = compare(tmp_path)

    assert done.returncode == 1
    assert said in done.stdout


def test_runs_without_a_gradient_show_nothing(tmp_path: Path) -> None:
    for side in ("before", "after"):
        record(tmp_path / side)
        edit(tmp_path / side / "quickstart/001", "metrics.jsonl", "0.5", "0.0")

    done = compare(tmp_path)

    assert done.returncode == 1
    assert "no step had a gradient" in done.stdout


def test_an_interpreter_of_another_checkout_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "record", tmp_path, tmp_path / "out", "--python", sys.executable]
    done = run_forked(command, timeout=300)

    assert done.returncode == 1
    assert f"not the files of {tmp_path}" in done.stderr
