"""The memory plan's counts for TorchTitan's blocks, against what autograd keeps."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from rlplug_plan.activations import block_elements, kept_elements
from rlplug_plan.model_shape import ModelShape
from rlplug_trainer_titan import TorchTitan
from rlplug_trainer_titan.attention import PackedSequences
from rlplug_trainer_titan.decoders import build_decoder
from titan_cases import SIZES
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from rlplug.interfaces import ActivationTraits

pytestmark = pytest.mark.skipif(find_spec("torchtitan") is None, reason="TorchTitan is not installed")

torch.set_num_threads(1)
NUM_TOKENS = 64
WIDTHS: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 16}


def shape_of(config: Any) -> ModelShape:
    with torch.device("meta"):
        return ModelShape.of(AutoModelForCausalLM.from_config(config))


def kept_in_bfloat16(config: Any) -> float:
    """Return the bfloat16 elements per token that autograd keeps of a block, its parameters left out."""
    decoder: Any = build_decoder(config)[0].to_empty(device="cpu")
    block = decoder.layers["0"]
    block.attention.rope.init_states()
    for parameter in block.parameters():
        parameter.data = 0.02 * torch.randn(parameter.shape, dtype=torch.bfloat16)
    own, kept = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}, {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.dtype == torch.bfloat16 and storage.data_ptr() not in own and storage.nbytes() >= NUM_TOKENS:
            kept[storage.data_ptr()] = storage  # kept, so that no other tensor takes its place
        return tensor

    hidden = torch.randn(1, NUM_TOKENS, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    sequences = PackedSequences(torch.tensor([0, NUM_TOKENS], dtype=torch.int32), NUM_TOKENS)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(hidden, sequences, torch.arange(NUM_TOKENS)[None])
    return sum(storage.nbytes() for storage in kept.values()) / 2 / NUM_TOKENS


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
def test_a_block_keeps_what_the_plan_says(config_class: Any) -> None:
    """On CPUs norms keep float32 copies in the place of their inputs, and the attention's result is copied once."""
    config = config_class(**(SIZES | WIDTHS))
    shape = shape_of(config)
    query, key, _ = shape.widths
    norm_inputs = 2 * shape.hidden + (query + key if shape.has_qk_norms else 0)
    planned = block_elements(shape, TorchTitan().plan_memory(ActivationTraits()))
    assert kept_in_bfloat16(config) == planned - norm_inputs + query


def test_options_change_the_plan() -> None:
    shape = shape_of(LlamaConfig(**(SIZES | WIDTHS)))
    hidden, (query, key, mlp) = shape.hidden, shape.widths

    def kept(shape: ModelShape = shape, **options: Any) -> int:
        return kept_elements(shape, TorchTitan(**options).plan_memory(ActivationTraits()))

    plain = 4 * hidden + 2 * (query + key) + 4 * mlp
    assert kept() == 3 * plain
    assert kept(compile=True) == 3 * (plain - mlp)
    assert kept(activation_checkpoint="full") == 3 * hidden + plain
    assert kept(activation_checkpoint="selective") == 3 * (2 * hidden + 2 * query + key + mlp) + plain
    half = shape.split(2, TorchTitan().plan_memory(ActivationTraits()).sequence_parallel)
    assert kept(half) == 3 * (3 * hidden + (query + key) + 2 * mlp), "inputs of norms are split, gathered results not"
    assert kept(half, activation_checkpoint="full") == 3 * hidden // 2 + kept(half) // 3
    assert half.parameters == pytest.approx(shape.parameters / 2, rel=0.01), "embeddings are split too"
    assert half.end_parameters == shape.end_parameters // 2
