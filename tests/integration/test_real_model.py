"""One GRPO step of SmolLM2-135M-Instruct on a reasoning-gym task, on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from command_line import ROOT
from forked import run_forked
from safetensors.torch import load_file

from rlplug.observability.metrics_log import read_metrics

pytestmark = pytest.mark.nightly  # a minute

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"  # `make test` fetches it


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in a process of its own and return the folder in which it ran."""
    folder = tmp_path_factory.mktemp("smollm2")
    script = Path(__file__).with_name("train_smollm2.py")
    run_forked([sys.executable, script, folder], timeout=840, check=True)
    return folder


def test_engine_and_trainer_agree(trained: Path) -> None:
    row = read_metrics(trained / "001" / "metrics.jsonl")[0]

    assert 0 < row["mismatch/mean"] < 1e-4  # float32 on both sides
    assert row["mismatch/max"] < 1e-2
    assert row["policy/grad_norm"] > 0


def test_the_weights_moved(trained: Path) -> None:
    before = load_file(MODEL / "model.safetensors")
    after = load_file(trained / "001" / "policy" / "model.safetensors")

    assert before.keys() == after.keys()
    # without weight decay, only a gradient moves a weight
    assert all(not torch.equal(after[name], weight) for name, weight in before.items())


def test_the_exported_folder_says_what_the_policy_in_memory_says(trained: Path) -> None:
    greedy = json.loads((trained / "greedy.json").read_text())

    assert greedy["exported"] == greedy["in_memory"]
    assert "Paris" in greedy["text"]
