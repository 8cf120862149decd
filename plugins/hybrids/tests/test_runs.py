"""Runs of the command line with hybrid policies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, SMALL, Job, Runs
from hybrid_models import HAS_WRAPPERS
from tiny_families import tiny

from rlplug.observability.metrics_log import read_metrics

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


OWN = ROOT / "tests" / "model"
"""The folder of the model whose tokenizer and special tokens all have."""


def known() -> dict[str, Any]:
    """Return the options that the tokenizer decides, and weights large enough that a leak shows."""
    read: dict[str, Any] = json.loads((OWN / "config.json").read_text())
    names = ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id")
    return {name: read[name] for name in names} | {"initializer_range": 0.25}


def write(config: Any, folder: Path) -> Path:
    config.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(OWN / name, folder)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return write(tiny("qwen3_5_text", **known()), tmp_path_factory.mktemp("qwen3_5"))


def job(policy: Path, run: Path, *more: str, **extra: Any) -> Job:
    own = ("--model.policy.path", str(policy), "--model.policy.init", "random", "--run.dir", str(run))
    return Job([*SMALL, *own, "--model.num_steps", "2", *more], extra)


def test_two_steps_learn_from_rows_that_engine_and_trainer_read_alike(policy, tmp_path) -> None:
    """Catches a trainer that cannot shard, checkpoint, synchronise or export such a policy, or computes other logprobs.

    The engine is transformers', whose batches are padded and which has neither hooks nor packed rows.
    """
    more = ("--model.trainer", "HybridTrainer", "--model.optimizations", "[GradientCheckpointing]")
    runs = Runs({"hybrid": job(policy, tmp_path / "run", *more)}, tmp_path)
    assert runs["hybrid"].exit_code == 0, runs["hybrid"].output
    assert "3 Qwen3_5GatedDeltaNet by a padded row for each sequence" in runs["hybrid"].message
    assert ("slow without" in runs["hybrid"].message) is HAS_WRAPPERS
    steps = read_metrics(tmp_path / "run" / "001" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["mismatch/max"] < 1e-4 for step in steps if "mismatch/max" in step)
    assert any("mismatch/max" in step for step in steps)
    assert any(step["policy/grad_norm"] > 0 for step in steps)


def test_the_default_trainer_refuses_before_a_rollout(policy, tmp_path) -> None:
    runs = Runs({"default": job(policy, tmp_path / "run")}, tmp_path)
    assert runs["default"].exit_code == 2
    assert "Qwen3_5GatedDeltaNet" in runs["default"].message
    assert "Set model.trainer to HybridTrainer" in runs["default"].message


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "trainer"), [("qwen3_5_text", "HybridTrainer"), ("mamba", "PaddedTrainer")])
def test_two_ranks_train_as_one_does(family: str, trainer: str, tmp_path) -> None:
    """Catches hooks that FSDP's hooks undo, or that read a layer's weights while they are sharded."""
    policy, more = write(tiny(family, **known()), tmp_path / family), ("--model.trainer", trainer)
    lines = {
        "1": job(policy, tmp_path / "1", *more),
        "2": job(policy, tmp_path / "2", *more, "--trainer.devices", "2"),
    }
    runs = Runs(lines, tmp_path)
    assert all(run.exit_code == 0 for run in runs.values()), [run.output for run in runs.values()]
    one, two = (read_metrics(tmp_path / name / "001" / "metrics.jsonl")[-1] for name in lines)
    assert one["policy/grad_norm"] > 0
    assert two["policy/grad_norm"] == pytest.approx(one["policy/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("family", [pytest.param("bloom", marks=pytest.mark.nightly), "mamba"])
def test_padded_rows_train_and_a_killed_run_goes_on_as_if_undisturbed(family: str, tmp_path) -> None:
    """Catches padded rows whose logprobs are not the engine's, and weights that their sync or checkpoints lose."""
    policy = write(tiny(family, **known()), tmp_path / family)
    own = ("--model.trainer", "PaddedTrainer", "--checkpoint.every_n_steps", "1")
    lines = {name: job(policy, tmp_path / name, *own) for name in ("whole", "killed")}
    lines["killed"].extra |= {"signal": "SIGKILL", "phase": "update", "step": 2}
    lines["resumed"] = Job(["fit", "--resume", str(tmp_path / "killed" / "001")], after="killed")
    runs = Runs(lines, tmp_path)
    assert "a padded row for each sequence" in runs.ended("whole").message
    runs.ended("killed", -9)
    runs.ended("resumed")
    whole, resumed = (read_metrics(tmp_path / name / "001" / "metrics.jsonl") for name in ("whole", "killed"))
    assert [step["step"] for step in resumed] == [1, 2]
    assert all(step["mismatch/max"] < 1e-4 for step in whole)
    assert whole[-1]["policy/grad_norm"] > 0
    for name in ("loss", "policy/grad_norm", "reward/mean", "mismatch/max"):
        assert [step[name] for step in resumed] == [step[name] for step in whole], name
    weights = Path("001") / "policy" / "model.safetensors"
    assert (tmp_path / "killed" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
