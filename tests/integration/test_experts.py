"""A mixture of experts trains by the command line: engine and trainer agree on it, on one rank, on two, and in FP8."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import SMALL, Job, Runs, samples
from experts_model import make_experts_model
from transformers import AutoModelForCausalLM

from rlplug.observability.metrics_log import read_metrics

DEEP = {
    "num_hidden_layers": 6,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "initializer_range": 0.08,
}
"""Sizes of a model in which rounding to bfloat16 routes some tokens elsewhere."""
BF16_ENGINE = [
    *("--model.rollout", "parts.BFloat16Engine", "--model.limits.mismatch_gate", "null", "--model.num_steps", "3"),
]


REPLAY = ["--model.router_replay", "true"]
TITAN = ["--model.trainer", "TorchTitan", "--model.trainer.init_args.expert", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, in which two of four experts see each token, and the quickstart's tokenizer."""
    folder = tmp_path_factory.mktemp("experts")
    make_experts_model(folder / "model")
    make_experts_model(folder / "deep", **DEEP)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Runs:
    model = ["--model.policy.path", str(folder / "model"), "--model.policy.init", "pretrained"]
    two = ["--trainer.devices", "2"]
    lines = {"one rank": [], "two ranks": two, "fp8": [*two, "--model.weight_sync.dtype", "fp8_block"]}
    base = [*SMALL, *model, "--model.num_steps", "2"]
    jobs = {
        name: Job([*base, *line, "--run.dir", str(folder / name)], num_ranks=2 if line else None)
        for name, line in lines.items()
    }
    deep = ["--model.policy.path", str(folder / "deep"), "--model.policy.init", "pretrained", *BF16_ENGINE]
    for name, line in {
        "decides": [],
        "replays": REPLAY,
        "replays on two": [*REPLAY, "--trainer.devices", "2", "--trainer.strategy.init_args.sequence", "2"],
        "replays on two, TorchTitan": [*REPLAY, "--trainer.devices", "2", *TITAN],
        "no capability": [*REPLAY, "--model.rollout", "parts.Silent"],
        "no experts": [*REPLAY, "--model.policy.path", "tests/model"],
    }.items():
        arguments = [*SMALL, *deep, *line, "--run.dir", str(folder / name)]
        jobs[name] = Job(arguments, num_ranks=2 if "two" in name else None)
    return Runs(jobs, folder)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    samples([("one rank", 0, 1e-5), ("two ranks", 0, 1e-5), ("fp8", 1e-5, 0.1)], ("one rank", 0, 1e-5)),
)
def test_engine_and_trainer_agree(name: str, least: float, most: float, folder: Path, results: Runs) -> None:
    """On a push, the two ranks that replay experts show that theirs agree without FP8 too."""
    results.ended(name, 0 if name == "one rank" else [0, 0])
    mismatches = [row["mismatch/mean"] for row in read_metrics(folder / name / "001" / "metrics.jsonl")]
    assert len(mismatches) == 2
    assert all(least <= mismatch < most for mismatch in mismatches)


def test_routers_are_kept(results: Runs) -> None:
    """Of two blocks, each with four layers of attention, three of each of four experts, and a router."""
    words = "FP8: 32 of 35 linear layers, with power-of-two scales; 3 kept: model.layers.*.mlp.gate (2), lm_head"
    assert words in results["fp8"].message


def test_the_policy_that_is_written_opens(folder: Path, results: Runs) -> None:
    results.ended("fp8", [0, 0])
    _, info = AutoModelForCausalLM.from_pretrained(folder / "fp8" / "001" / "policy", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def columns(run: Path, *names: str) -> list[list[float]]:
    """Return columns of a run's metrics."""
    rows = read_metrics(run / "001" / "metrics.jsonl")
    return [[row[name] for row in rows] for name in names]


@pytest.mark.nightly
def test_replay_lowers_the_mismatch_of_an_engine_that_rounds(folder: Path, results: Runs) -> None:
    """Both runs draw the same first completions, with the same weights; experts of other tokens would raise it."""
    results.ended("decides")
    results.ended("replays")
    (without,), (replayed, differs) = (
        columns(folder / "decides", "mismatch/mean"),
        columns(folder / "replays", "mismatch/mean", "router/differ"),
    )
    assert len(without) == 3
    assert replayed[0] < 0.7 * without[0]
    assert all(0 < share < 0.2 for share in differs)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["replays on two", "replays on two, TorchTitan"])
def test_ranks_that_share_sequences_or_experts_replay_the_same(folder: Path, results: Runs, name: str) -> None:
    results.ended("replays")
    results.ended(name, [0, 0])
    one, two = (columns(folder / each, "mismatch/mean", "router/differ") for each in ("replays", name))
    assert two[0][0] == pytest.approx(one[0][0], rel=1e-3)
    assert two[1][0] == pytest.approx(one[1][0], rel=0.02)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no capability", "model.router_replay needs an engine with 'routed_experts', which Silent lacks"),
        ("no experts", "model.router_replay is true, and LlamaForCausalLM is no mixture of experts: remove it"),
    ],
)
def test_replay_is_refused_where_it_cannot_be(name: str, message: str, results: Runs) -> None:
    assert message in results.ended(name, 2).message
