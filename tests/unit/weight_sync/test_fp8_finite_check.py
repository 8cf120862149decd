"""NaN and infinite weights stop a sync before it begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from rlplug.errors import RunError
from rlplug.interfaces import FP8Weights
from rlplug.weight_sync.config import WeightSyncConfig
from rlplug.weight_sync.fp8_layers import check_finite, choose_fp8_weights
from rlplug.weight_sync.hf_names import attach_adapters
from rlplug.weight_sync.low_rank import Adapters, LowRankUpdate

FP8 = FP8Weights(quantized=("0.weight", "1.weight"), kept=("2.weight",))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def test_finite_weights_pass(model):
    check_finite(model, torch.bfloat16, FP8)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3.4e38])
def test_what_fp8_cannot_hold_is_named(model, value):
    """The last is finite in float32, and infinite in bfloat16."""
    model[1].weight.data[3, 4] = value
    with pytest.raises(RunError, match=r"^Weight sync aborted before sending: 1\.weight contains NaN or inf"):
        check_finite(model, torch.bfloat16, FP8)


def test_several_are_counted(model):
    model[0].weight.data[0, 0] = model[1].weight.data[0, 0] = torch.nan
    with pytest.raises(RunError, match=r": 0\.weight and 1 more"):
        check_finite(model, torch.bfloat16, FP8)


@pytest.mark.parametrize("part", ["down", "up"])
def test_an_adapter_that_is_merged_on_the_way_is_looked_at(model, part):
    """With LoRA the matrix is frozen, and always finite."""
    update = LowRankUpdate(nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False), 1.0)
    attach_adapters(model, Adapters({"1.weight": update}, {name: name for name, _ in model.named_parameters()}))
    check_finite(model, torch.bfloat16, FP8)
    getattr(update, part).weight.data[0, 0] = torch.nan
    with pytest.raises(RunError, match=rf": the adapter of 1\.weight \({part}\) contains NaN or inf"):
        check_finite(model, torch.bfloat16, FP8)


def test_what_travels_as_it_is_is_not_looked_at(model):
    model[2].weight.data[0, 0] = model[0].bias.data[0] = torch.nan
    check_finite(model, torch.bfloat16, FP8)


def test_one_of_the_experts_is_enough():
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_local_experts": 3}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    fp8 = choose_fp8_weights(model, WeightSyncConfig(dtype="fp8_block", keep_first_layers=1))
    model.model.layers[0].mlp.experts.down_proj.data[1, 2, 3] = torch.nan  # it is kept
    check_finite(model, torch.bfloat16, fp8)
    model.model.layers[1].mlp.experts.down_proj.data[1, 2, 3] = torch.nan
    with pytest.raises(RunError, match=r": model\.layers\.1\.mlp\.experts\.down_proj contains NaN or inf"):
        check_finite(model, torch.bfloat16, fp8)
