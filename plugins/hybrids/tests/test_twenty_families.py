"""Twenty families and more on two ranks, all in one start: sharded, with checkpointing, and with adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hybrid_models import FAMILIES, REFUSED, enlarge
from ranks import run_ranks
from tiny_families import tiny
from transformers import AutoModelForCausalLM

MORE = (
    *("diffllama", "gemma4_text", "granite", "mistral", "mixtral", "olmo2", "olmoe", "qwen2", "qwen4_exp_text"),
    *("smollm3", "starcoder2"),
)
"""Beside those of ``hybrid_models.py``: weights drawn on the CPU, options for each layer, scaled logits, windows,
experts, biases, and divisors in buffers."""
PADDED = ("bloom", "llama4_text", "mamba2", "nemotron", "xlstm")
"""Of ``PaddedTrainer``."""
TRIED = sorted({*FAMILIES.keys() - REFUSED.keys(), *MORE, *PADDED})


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("families")
    for family in TRIED:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny(family), dtype=torch.float32)
        enlarge(model)
        model.save_pretrained(folder / family)
    run_ranks([str(Path(__file__).with_name("family_ranks.py")), str(folder), *PADDED], 2, timeout=1800)
    found: dict[str, list[str]] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("family", TRIED)
def test_two_ranks_have_the_gradients_of_one_and_adapters_train(family: str, problems: dict[str, list[str]]) -> None:
    """Catches layers that FSDP splits wrongly or recomputes with stale borders, and adapters that nothing calls."""
    assert problems[family] == ["", ""]
