"""A mixture of experts trains by the command line: engine and trainer agree on it, on one rank, on two, and in FP8."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from command_line import ROOT, SMALL, Job, Runs
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

QUICKSTART = ROOT / "examples" / "quickstart" / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, in which two of four experts see each token, and the quickstart's tokenizer."""
    folder = tmp_path_factory.mktemp("experts")
    shutil.copytree(QUICKSTART, folder / "model")
    former = json.loads((QUICKSTART / "config.json").read_text())
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    same += ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    experts = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**{name: former[name] for name in same}, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
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
    return Runs(jobs, folder)


@pytest.mark.parametrize(("name", "least", "most"), [("one rank", 0, 1e-5), ("two ranks", 0, 1e-5), ("fp8", 1e-5, 0.1)])
def test_engine_and_trainer_agree(name: str, least: float, most: float, folder: Path, results: Runs) -> None:
    results.ended(name, 0 if name == "one rank" else [0, 0])
    with (folder / name / "001" / "metrics.csv").open(newline="") as file:
        mismatches = [float(row["mismatch/mean"]) for row in csv.DictReader(file)]
    assert len(mismatches) == 2
    assert all(least <= mismatch < most for mismatch in mismatches)


def test_routers_are_kept(results: Runs) -> None:
    """Of two blocks, each with four layers of attention, three of each of four experts, and a router."""
    words = "FP8: 32 of 35 linear layers, with float32 scales; 3 kept: model.layers.*.mlp.gate (2), lm_head"
    assert words in results["fp8"].message


def test_the_policy_that_is_written_opens(folder: Path, results: Runs) -> None:
    results.ended("two ranks", [0, 0])
    _, info = AutoModelForCausalLM.from_pretrained(folder / "two ranks" / "001" / "policy", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
