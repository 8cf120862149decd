"""Runs that train on a step's groups while others are generated, beside the same runs whose steps wait for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import SMALL, Job, Runs, samples
from safetensors.torch import load_file
from torch.testing import assert_close

from rlplug.observability.metrics_log import read_metrics

NUM_STEPS = 3
KEPT = ("loss", "policy/", "advantages/", "reward/", "completion/", "filter/", "mismatch/", "router/")
"""Beginnings of the metrics that a streamed step must share with one that waits."""
OF_RANKS = ("/ties", "/noise")
"""Ends of those that are means of ratios of each rank's own groups, which other ranks may have."""
STREAMED = ["--model.partial_rollout", "{asynchronous: true, max_staleness: 0}"]
BASE = [
    *(*SMALL, "--model.num_steps", str(NUM_STEPS), "--checkpoint.every_n_steps", "1"),
    *("--model.rollout", "streaming_parts.OneGroupLater"),
]
ALGORITHMS = {
    "GRPO": [],
    "kl": ["--model.algorithm.kl_coefficient", "0.05", "--model.algorithm.aggregation", "sequence"],
    "corrected": ["--model.algorithm.correction", "{}", "--model.algorithm.entropy_coefficient", "0.01"],
    "DrGRPO": ["--model.algorithm", "DrGRPO"],
    "GSPO": ["--model.algorithm", "GSPO"],
    "CISPO": ["--model.algorithm", "CISPO"],
    "RLOO": ["--model.algorithm", "RLOO", "--model.algorithm.kl_coefficient", "0.05"],
    "DAPO": ["--model.algorithm", "DAPO", "--model.algorithm.overlong_filter", "true"],
    "one completion a pass": ["--model.batch.micro_batch_size_per_gpu", "1"],
}
STOPS = {"SIGTERM": ("rewards", 4, 143), "SIGKILL": ("update", 4, -9)}
"""Signal, the phase and which of its entries it comes in, and the exit status."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder, jobs = tmp_path_factory.mktemp("streamed"), {}
    for name, options in ALGORITHMS.items():
        line = [*BASE, *options, "--run.dir", str(folder / name)]
        jobs[name] = Job(line)
        jobs[f"{name}-1"] = Job([*line, *STREAMED])
        jobs[f"{name}-2"] = Job([*line, *STREAMED, "--trainer.devices", "2"], num_ranks=2)
    for signal, (phase, step, _) in STOPS.items():
        line = [*BASE, *STREAMED, "--run.dir", str(folder / signal)]
        jobs[signal] = Job(line, {"signal": signal, "phase": phase, "step": step})
        jobs[f"{signal}-resumed"] = Job(["fit", "--resume", str(folder / signal / "001")], after=signal)
    return Runs(jobs, folder, timeout=300)


def folder_of(runs: Runs, name: str) -> Path:
    """Return the run folder of a job that is run now; those of one algorithm run in the order of the test."""
    base = runs.folder / name.split("-")[0]
    before = set(base.glob("*"))
    runs.ended(name, [0, 0] if name.endswith("-2") else 0)
    (made,) = set(base.glob("*")) - before
    return made


def rows(folder: Path) -> list[dict[str, float]]:
    return read_metrics(folder / "metrics.jsonl")


def samples_of(folder: Path) -> list[tuple[str, float]]:
    """Return what a run's file says of each sample, sorted, and its advantage."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return sorted((json.dumps(line | {"advantage": None}), line["advantage"]) for line in lines)


def assert_same_training(folder: Path, other: Path) -> None:
    """Completions are the same; advantages, metrics and weights are, but for round-off."""
    (texts, advantages), (expected_texts, expected) = (zip(*samples_of(path), strict=True) for path in (folder, other))
    assert texts == expected_texts
    assert advantages == pytest.approx(expected, abs=2e-6)  # they are written with six digits
    for row, expected in zip(rows(folder), rows(other), strict=True):
        shared = {
            name: value for name, value in expected.items() if name.startswith(KEPT) and not name.endswith(OF_RANKS)
        }
        assert {name: row[name] for name in shared} == pytest.approx(shared, rel=1e-3, abs=1e-5)
    weights, expected_weights = (load_file(path / "policy" / "model.safetensors") for path in (folder, other))
    for name, weight in expected_weights.items():
        assert_close(weights[name], weight, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "num_ranks"), samples([(name, ranks) for name in ALGORITHMS for ranks in (1, 2)], ("GRPO", 1))
)
def test_a_streamed_run_trains_as_one_that_waits(runs: Runs, name: str, num_ranks: int) -> None:
    """It catches passes with wrong denominators, groups that train twice or never, and other samples."""
    streamed = folder_of(runs, f"{name}-{num_ranks}")
    waited = next(iter(sorted((runs.folder / name).glob("*.waited"))), None)
    if waited is None:
        waited = folder_of(runs, name).rename(runs.folder / name / "0.waited")
    assert max(row["partial/on_arrival_batches"] for row in rows(streamed)) > 1
    assert min(row["partial/overlap_s"] for row in rows(streamed)) >= 0
    assert_same_training(streamed, waited)


@pytest.mark.nightly
@pytest.mark.parametrize("signal", STOPS)
def test_a_stopped_step_is_repeated_from_its_start(runs: Runs, signal: str) -> None:
    """It catches gradients or groups of an interrupted step that are left over."""
    runs.ended(signal, STOPS[signal][2])
    runs.ended(f"{signal}-resumed")
    waited = runs.folder / "GRPO" / "0.waited"
    if not waited.exists():
        folder_of(runs, "GRPO").rename(waited)
    assert_same_training(runs.folder / signal / "001", waited)
