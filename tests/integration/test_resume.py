"""A run that is killed or interrupted in any phase, and resumed, equals one that was left alone, bit for bit."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlplug.checkpoint import list_checkpoints
from rlplug.phases import PHASES

ROOT = Path(__file__).parents[2]
KILLED_IN = (*PHASES, "validate", "checkpoint")
INTERRUPTED_IN = ("rollout", "advantages", "update", "publish")

SMALL_RUN = [
    *("fit", "--config", "configs/quickstart.yaml"),
    *("--model.num_steps", "5", "--model.batch.prompts_per_step", "4", "--model.batch.group_size", "4"),
    *("--model.batch.mini_batch_size", "8", "--model.batch.num_epochs", "2", "--model.batch.max_tokens_per_gpu", "64"),
    *("--model.validation.every_n_steps", "2", "--checkpoint.every_n_steps", "2", "--run.report", "false"),
]
UNREPEATABLE = ("time/", "memory/", "throughput/", "rollout/tokens_per_s", "sync/")
"""What depends on the clock, and on whether the engine is a new one that has no weights yet."""


def run_all(jobs: list[dict[str, object]], folder: Path) -> list[int]:
    """Run the jobs one after another and return their exit codes."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = ROOT / "tests" / "integration" / "forked_runs.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "jobs.json")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # the model is tiny
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    (folder / "log.txt").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    codes: list[int] = json.loads(done.stdout.rpartition("exit codes:")[2])
    return codes


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run undisturbed, and stopped and resumed in every way; each ends in a folder of its own below."""
    folder = tmp_path_factory.mktemp("resume")
    jobs: list[dict[str, object]] = [{"arguments": [*SMALL_RUN, "--run.dir", str(folder / "undisturbed")]}]
    expected = [0]
    ways = [("SIGKILL", phase) for phase in KILLED_IN] + [("SIGINT", phase) for phase in INTERRUPTED_IN]
    for number, phase in ways:
        run_dir = folder / f"{number}-{phase}"
        # validation and checkpoints are due after every second step
        step = 4 if phase in ("validate", "checkpoint") else 3
        stopped = [*SMALL_RUN, "--run.dir", str(run_dir)]
        jobs.append({"arguments": stopped, "signal": number, "phase": phase, "step": step})
        jobs.append({"arguments": ["fit", "--resume", str(run_dir / "001")]})
        expected += [-9 if number == "SIGKILL" else 130, 0]
    assert run_all(jobs, folder) == expected, (folder / "log.txt").read_text()[-5000:]
    return folder


def metrics(run_dir: Path) -> list[dict[str, str]]:
    """Return the rows of ``metrics.csv`` without what depends on the clock."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith(UNREPEATABLE)} for row in rows]


@pytest.mark.parametrize("phase", KILLED_IN)
def test_killed_in_any_phase_and_resumed_equals_undisturbed(finished: Path, phase: str) -> None:
    undisturbed, resumed = finished / "undisturbed" / "001", finished / f"SIGKILL-{phase}" / "001"

    assert metrics(resumed) == metrics(undisturbed)
    weights = Path("policy") / "model.safetensors"
    assert (resumed / weights).read_bytes() == (undisturbed / weights).read_bytes()
    assert (resumed / "samples.jsonl").read_text() == (undisturbed / "samples.jsonl").read_text()


@pytest.mark.parametrize("phase", INTERRUPTED_IN)
def test_ctrl_c_saves_and_resumes_exactly(finished: Path, phase: str) -> None:
    undisturbed, resumed = finished / "undisturbed" / "001", finished / f"SIGINT-{phase}" / "001"

    assert metrics(resumed) == metrics(undisturbed)
    weights = Path("policy") / "model.safetensors"
    assert (resumed / weights).read_bytes() == (undisturbed / weights).read_bytes()
    assert f"rlplug fit --resume {resumed}" in " ".join((finished / "log.txt").read_text().split())


def test_the_run_is_long_enough_to_notice_a_lost_step(finished: Path) -> None:
    rows = metrics(finished / "undisturbed" / "001")

    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert len({row["loss"] for row in rows[1:]}) == 5  # the weights change from step to step
    assert [path.name for path in list_checkpoints(finished / "undisturbed" / "001")] == [
        "step-00000004",
        "step-00000005",
    ]
