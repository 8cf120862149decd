"""Decays of layers with a state keep float32 on two ranks that compute in bfloat16, and on their way to an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hybrid_models import config_of, enlarge
from ranks import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from rlplug.weight_sync.config import WeightSyncConfig
from rlplug.weight_sync.fp8_layers import choose_fp8_weights

PUSHED = ("qwen3_5_text", "nemotron_h")
MORE = ("qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "falcon_h1", "granitemoehybrid", "bamba", "jamba")


def check(families: tuple[str, ...], folder: Path) -> None:
    for family in families:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
        enlarge(model)
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                torch.nn.init.uniform_(parameter, 0.1, 1)  # not the ones and logarithms that bfloat16 may hold
        model.save_pretrained(folder / family)
    run_ranks([str(Path(__file__).with_name("decay_ranks.py")), str(folder)], 2)
    found = json.loads((folder / "results.json").read_text())
    nothing: dict[str, list[str]] = {name: [] for name in ("passes", "gradients", "sync", "engine", "others")}
    assert found == dict.fromkeys(families, nothing)


def test_decays_are_not_rounded(tmp_path: Path) -> None:
    """Catches decays that FSDP casts to bfloat16 with their layer, that it never trains, or that a sync rounds."""
    check(PUSHED, tmp_path)


@pytest.mark.nightly
def test_decays_of_more_families_are_not_rounded(tmp_path: Path) -> None:
    """Catches decays in a module inside the layer, and those that transformers renames."""
    check(MORE, tmp_path)


@pytest.mark.parametrize(
    ("family", "layer", "kept"),
    [
        ("qwen3_5_text", "linear_attn", {"in_proj_a", "in_proj_b"}),
        ("qwen3_next", "linear_attn", {"in_proj_ba"}),
        ("kimi_linear", "self_attn", {"f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj"}),
        ("jamba", "mamba", {"x_proj", "dt_proj"}),
        ("falcon_h1", "mamba", {"in_proj"}),
    ],
)
def test_what_computes_decays_is_not_sent_in_fp8(family: str, layer: str, kept: set[str]) -> None:
    """Official FP8 files leave these out, and vLLM knows no FP8 blocks of such narrow ones, of models' own sizes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=8))
    fp8 = choose_fp8_weights(model, WeightSyncConfig(dtype="fp8_block"))
    assert {name.split(".")[-2] for name in fp8.kept if f".{layer}." in name} == kept
    assert any(f".{layer}." in name for name in fp8.quantized)
