"""Runs of the command line with TorchTitan: they equal those with transformers, and resume to the last bit.

The run that is resumed has a critic and a reference policy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ROOT, SMALL, Job, Runs, samples
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rlplug.observability.metrics_log import read_metrics

pytestmark = pytest.mark.kit

TITAN = ["--model.trainer", "TorchTitan"]
REFERENCE = ["--model.algorithm.kl_coefficient", "0.05"]
RUN = [
    *(*SMALL, *REFERENCE, "--model.num_steps", "5", "--checkpoint.every_n_steps", "2"),
    *("--model.batch.mini_batch_size", "8", "--model.batch.micro_batch_size_per_gpu", "3"),
]
QUICKSTART = [
    *("fit", "--config", "configs/quickstart.yaml", "--run.report", "false"),
    *("--model.validation.at_start", "false", "--model.validation.every_n_steps", "null"),
]
UNFUSED = ["--model.optimizer.init_args.fused", "false"]  # torch shards no fused SGD
SGD = [*RUN, "--model.optimizer", "torch.optim.SGD", "--model.optimizer.init_args.lr", "0.3", *UNFUSED]
"""Adam would make whole steps of round-off where all completions of a mini-batch earn the same."""
CRITIC = ["--model.algorithm", "PPO", *REFERENCE, "--model.critic.seed", "3"]
PPO = [*SGD, *CRITIC, "--model.critic.optimizer", "torch.optim.SGD", "--model.critic.optimizer.init_args.lr", "0.03"]
SHARED = [*PPO, "--model.critic.share_trunk", "true"]
TWO = ["--trainer.devices", "2"]
TENSOR = [*TWO, "--trainer.strategy.init_args.tensor", "2"]
FUSED = ["--model.optimizations", "[{class_path: FusedLogprobs, init_args: {chunk_size: 5}}]"]
LINES: dict[str, list[str]] = {
    "titan": [*RUN, *CRITIC, *TITAN],
    "killed": [*RUN, *CRITIC, *TITAN],
    "20 steps": [*QUICKSTART, "--model.num_steps", "20"],
    "titan, 20 steps": [*QUICKSTART, *TITAN, "--model.num_steps", "20"],
    "titan, 20 steps, tensor 2": [*QUICKSTART, *TITAN, *TENSOR, "--model.num_steps", "20"],
    "reference": SGD,
    "titan, reference": [*SGD, *TITAN],
    "titan, shard 2": [*SGD, *TITAN, *TWO],
    "titan, tensor 2": [*SGD, *TITAN, *TENSOR],
    "titan, tensor 2, fused": [*SGD, *TITAN, *TENSOR, *FUSED],
    "ppo": PPO,
    "titan, ppo": [*PPO, *TITAN],
    "titan, ppo, shard 2": [*PPO, *TITAN, *TWO],
    "titan, ppo, tensor 2": [*PPO, *TITAN, *TENSOR],
    "shared": SHARED,
    "titan, shared, shard 2": [*SHARED, *TITAN, *TWO],
    "titan, shared, tensor 2": [*SHARED, *TITAN, *TENSOR],
}
EXPERTS = [*TITAN, *TWO, "--model.trainer.init_args.expert", "2"]
ON_EXPERTS: dict[str, list[str]] = {
    "experts": [*RUN, *EXPERTS],
    "experts, reference": SGD,
    "experts, expert 2": [*SGD, *EXPERTS],
    "experts, shard 2": [*SGD, *TITAN, *TWO],
}
"""Lines that train a mixture of experts."""
ON_REFERENCE = ("titan, reference", "titan, shard 2", "titan, tensor 2", "titan, tensor 2, fused")
PAIRS = samples(
    [
        *((name, "20 steps") for name in ("titan, 20 steps", "titan, 20 steps, tensor 2")),
        *((name, "reference") for name in ON_REFERENCE),
        *((name, "ppo") for name in ("titan, ppo", "titan, ppo, shard 2", "titan, ppo, tensor 2")),
        *((name, "shared") for name in ("titan, shared, shard 2", "titan, shared, tensor 2")),
        ("experts, expert 2", "experts, reference"),
        ("experts, shard 2", "experts, reference"),
    ],
    ("titan, reference", "reference"),
)
OTHERS = {"titan": "TransformersTrainer", "reference": "TorchTitan"}
"""Runs that another trainer is to resume."""
OF_ONE_RANK = ("rollout/num_tokens",)
UNREPEATABLE = (
    *("time/", "memory/", "throughput/", "sync/", "rollout/tokens_per_s", "environment/seconds", "reward_seconds/"),
    "offload/",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("titan-runs")
    experts = ["--model.policy.path", str(mixture_of_experts(folder / "model"))]
    lines = LINES | {name: [*line, *experts] for name, line in ON_EXPERTS.items()}
    jobs = {
        name: Job([*line, "--run.dir", str(folder / name)], num_ranks=2 if TWO[0] in line else None)
        for name, line in lines.items()
    }
    jobs["killed"].extra.update({"signal": "SIGKILL", "phase": "update", "step": 4})
    resume = ["fit", "--resume", str(folder / "killed" / "001")]
    jobs["resumed"] = Job(resume, after="killed")
    for former, trainer in OTHERS.items():
        copy = folder / f"copy of {former}" / "001"
        resume = ["fit", "--resume", str(copy), "--model.trainer", trainer, "--model.num_steps", "9"]
        jobs[f"other, {former}"] = Job(resume, after=former, copy=(folder / former / "001", copy))
    return Runs(jobs, folder)


def mixture_of_experts(folder: Path) -> Path:
    """Return a folder with the tests' tokenizer and a configuration, of which `init: random` draws the weights."""
    shutil.copytree(ROOT / "tests" / "model", folder)
    former = json.loads((folder / "config.json").read_text())
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    same += ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    Qwen3MoeConfig(**{name: former[name] for name in same}, **experts).save_pretrained(folder)
    return folder


def folder_of(runs: Runs, name: str) -> Path:
    job = runs.jobs[name]
    runs.ended(name, 0 if job.num_ranks is None else [0] * job.num_ranks)
    return runs.folder / name / "001"


def metrics(folder: Path) -> list[dict[str, float]]:
    """Return the rows of ``metrics.jsonl`` without what depends on the clock."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(UNREPEATABLE)} for row in rows]


def assert_close(here: list[dict[str, float]], there: list[dict[str, float]]) -> None:
    assert len(here) == len(there) > 0
    for mine, other in zip(here, there, strict=True):
        for name in sorted(name for name in mine.keys() & other.keys() if name not in OF_ONE_RANK):
            expected = pytest.approx(other[name], rel=1e-5, abs=1e-5, nan_ok=True)
            assert mine[name] == expected, f"step {mine['step']}: {name}"


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_a_run_equals_one_with_transformers(runs: Runs, name: str, other: str) -> None:
    """It catches a trainer that trains, or syncs, another model than the folder's."""
    here, there = folder_of(runs, name), folder_of(runs, other)
    assert_close(metrics(here), metrics(there))
    policies = [load_file(folder / "policy" / "model.safetensors") for folder in (here, there)]
    assert policies[0].keys() == policies[1].keys()
    for weight in policies[0]:
        torch.testing.assert_close(policies[0][weight], policies[1][weight], rtol=0, atol=2e-5)


@pytest.mark.nightly
def test_a_killed_run_resumes_exactly(runs: Runs) -> None:
    """It catches optimizer state, weights or names that a checkpoint lost."""
    runs.ended("killed", -9)
    runs.ended("resumed")
    resumed, undisturbed = runs.folder / "killed" / "001", folder_of(runs, "titan")
    assert metrics(resumed) == metrics(undisturbed)
    weights = Path("policy") / "model.safetensors"
    assert (resumed / weights).read_bytes() == (undisturbed / weights).read_bytes()


@pytest.mark.parametrize(("former", "trainer"), samples(OTHERS.items(), ("titan", "TransformersTrainer")))
def test_another_trainer_is_refused_and_changes_nothing(runs: Runs, former: str, trainer: str) -> None:
    """It catches weights that are read under other names, and a run folder that is written before they are."""
    folder = folder_of(runs, former)
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"]
    before = {path: (folder / path).read_bytes() for path in paths}
    message = runs.ended(f"other, {former}", 2).message
    known = ("TransformersTrainer", "TorchTitan")
    assert f"model.trainer is {trainer}, and checkpoint" in message
    assert f"was written with {next(name for name in known if name != trainer)}" in message
    assert "model.policy.init pretrained" in message
    copy = runs.folder / f"copy of {former}" / "001"
    assert {path: (copy / path).read_bytes() for path in before} == before


@pytest.mark.nightly
def test_a_mixture_of_experts_resumes_exactly_with_expert_parallelism(runs: Runs) -> None:
    """It catches shards of experts, or their optimizer state, that a checkpoint mixes up between ranks."""
    undisturbed = folder_of(runs, "experts")
    assert metrics(undisturbed)[-1]["mismatch/mean"] < 1e-5
    resumed = runs.folder / "resumed experts" / "001"
    shutil.copytree(undisturbed, resumed)
    line = ["fit", "--resume", str(resumed), "--ckpt_path", str(resumed / "checkpoints" / "step-00000004")]
    runs.jobs["resumed experts"] = Job(line, num_ranks=2)
    runs.ended("resumed experts", [0, 0])
    assert metrics(resumed) == metrics(undisturbed)
    weights = Path("policy") / "model.safetensors"
    assert (resumed / weights).read_bytes() == (undisturbed / weights).read_bytes()


def test_a_run_says_what_it_trained_and_exports_it(runs: Runs) -> None:
    folder = folder_of(runs, "titan")
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    assert any("TorchTitan 0.3" in effect and "Llama3Model" in effect for effect in record["effects"])
    assert json.loads((folder / "policy" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert AutoModelForCausalLM.from_pretrained(folder / "policy").config.model_type == "llama"
