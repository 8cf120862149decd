"""Shapes: parameters counted by hand, widths from the configuration."""

from __future__ import annotations

import pytest
from memory_cases import LLAMA, QWEN, shape_of
from rlplug_plan.activations import block_elements, kept_elements
from transformers import Qwen3MoeConfig

from rlplug.interfaces import ActivationTraits


def test_parameters_of_a_tied_llama() -> None:
    block = 4 * 2048 * 2048 + 3 * 2048 * 8192 + 2 * 2048
    assert LLAMA.block_parameters == block
    assert LLAMA.end_parameters == 49152 * 2048
    assert LLAMA.parameters == 24 * block + 49152 * 2048 + 2048
    assert LLAMA.kv_elements * 2 == 196_608  # bytes a token that vLLM 0.26 reported for this shape
    assert not LLAMA.has_qk_norms


def test_parameters_of_an_untied_qwen3() -> None:
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert QWEN.parameters == 36 * block + 2 * 151936 * 4096 + 4096
    assert QWEN.end_parameters == 151936 * 4096
    assert tuple(QWEN.widths) == (4096, 1024, 12288)
    assert QWEN.has_qk_norms


def test_experts_count_as_visited() -> None:
    config = Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=128,
    )
    shape = shape_of(config)
    assert shape.widths.mlp == 2 * 32
    assert shape.block_parameters > 8 * 3 * 64 * 32


def test_tensor_ranks_split_blocks_alone() -> None:
    half = LLAMA.split(2)
    assert half.widths.mlp == 4096
    assert half.parameters - half.end_parameters == pytest.approx(
        (LLAMA.parameters - LLAMA.end_parameters) / 2, rel=1e-3
    )
    assert half.end_parameters == LLAMA.end_parameters
    assert LLAMA.split(1) is LLAMA


def test_what_is_recomputed_or_moved_is_not_kept() -> None:
    block = block_elements(LLAMA, ActivationTraits())
    assert kept_elements(LLAMA, ActivationTraits()) == 24 * block
    assert kept_elements(LLAMA, ActivationTraits(activations_on_host=True)) == 2 * block
    assert kept_elements(LLAMA, ActivationTraits(recompute="all")) == 24 * 2048 + block
    half = ActivationTraits(recompute="all", recompute_every=2)
    assert kept_elements(LLAMA, half) == 12 * 2048 + 12 * block + block
