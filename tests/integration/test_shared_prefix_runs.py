"""Runs whose completions share a prompt take the steps of runs that compute it for each, beside every other feature."""

from __future__ import annotations

import pytest
from command_line import SMALL, Job, Runs, samples
from experts_model import make_experts_model
from shared_prefix_cases import COMBINATIONS

from rlplug.observability.metrics_log import read_metrics

COMPARED = (
    "loss",
    "policy/grad_norm",
    "policy/entropy",
    "policy/kl",
    "mismatch/mean",
    "critic/loss",
    "critic/grad_norm",
)
SHARED = "completions of a group compute their prompt once"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("shared")
    experts = make_experts_model(folder / "experts")
    jobs = {}
    for name, each in COMBINATIONS.items():
        arguments = [argument.replace("{experts}", str(experts)) for argument in each.arguments]
        ranks = each.num_ranks if each.num_ranks > 1 else None
        for value in ("true", "false"):
            words = [*SMALL, "--model.num_steps", "2", "--model.batch.share_prefixes", value, *arguments]
            jobs[f"{name}-{value}"] = Job([*words, "--run.dir", str(folder / f"{name}-{value}")], num_ranks=ranks)
    return Runs(jobs, folder)


@pytest.mark.parametrize("name", samples(COMBINATIONS, "alone", "sequence"))
def test_steps_are_those_of_a_prompt_each(name: str, runs: Runs) -> None:
    """Alone catches a feature that is wrong beside shared prompts, or that silently stops them."""
    case = COMBINATIONS[name]
    codes = [0] * case.num_ranks if case.num_ranks > 1 else 0
    line = runs.ended(f"{name}-true", codes).message
    rows = read_metrics(runs.folder / f"{name}-true" / "001" / "metrics.jsonl")
    if case.why_not:
        assert "compute their prompt each: " in line
        assert case.why_not in line.partition("compute their prompt each: ")[2]
        assert "batch/shared_tokens" not in rows[0]
        return
    runs.ended(f"{name}-false", codes)
    plain = read_metrics(runs.folder / f"{name}-false" / "001" / "metrics.jsonl")
    assert SHARED in line
    assert all(row["batch/shared_tokens"] > 0.1 for row in rows)
    assert rows[0]["policy/grad_norm"] > 1e-3
    for ours, theirs in zip(rows, plain, strict=True):
        for column in COMPARED:
            expected = theirs.get(column)
            assert ours.get(column) == (expected and pytest.approx(expected, rel=1e-4, abs=1e-6)), column
