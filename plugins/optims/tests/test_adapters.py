"""Adapters over frozen weights get plain torch's gradients, packed and with each optimization."""

from __future__ import annotations

import sys

import pytest
import torch
from optims_models import Results, assert_same, optimized_results, plain_results, tiny_batch, tiny_model
from rlplug_optims import (
    CompileBlocks,
    EntropyCheckpointing,
    EntropyChunking,
    FusedLogprobs,
    GradientCheckpointing,
    Liger,
    SelectiveCheckpointing,
)

from rlplug.models.loading import to_empty_on
from rlplug.models.lora.adapters import add_adapters, load_adapters
from rlplug.models.lora.config import LoRAConfig
from rlplug.weight_sync.hf_names import adapters_of

LORA = LoRAConfig(rank=3, alpha=7)
COMBINATIONS = {
    "packing": list,
    "fused": lambda: [FusedLogprobs(chunk_size=8, compile=False)],
    "entropy": lambda: [EntropyChunking(chunk_size=8), EntropyCheckpointing()],
    "checkpointing": lambda: [GradientCheckpointing()],
    "selective": lambda: [SelectiveCheckpointing()],
}
COMPILED = {
    "aot_eager": lambda: [CompileBlocks(backend="aot_eager")],
    "all": lambda: [GradientCheckpointing(), CompileBlocks(backend="aot_eager"), FusedLogprobs(chunk_size=8)],
    "real": lambda: [GradientCheckpointing(), CompileBlocks(), FusedLogprobs(chunk_size=8, compile=True)],
}


def adapted_model(family, packed=True):
    """Return a model whose adapters have values, as after some training: B is no longer zero."""
    model = tiny_model(family, packed=packed)
    add_adapters(model, LORA, torch.float32)
    to_empty_on(model, torch.device("cpu"))
    load_adapters(model, LORA)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for update in adapters_of(model).updates.values():
            update.up.weight.normal_(std=0.3, generator=generator)
    return model


def assert_gradients_of_adapters(family, optimizations, device="cpu", rtol=1e-5):
    expected = plain_results(adapted_model(family, packed=False), tiny_batch())
    model = adapted_model(family).to(device)
    for optimization in optimizations:
        optimization.before_shard(model)
    result = optimized_results(model, tiny_batch())
    assert {name.split(".")[-3] for name in result.gradients} == {"lora_A", "lora_B"}
    assert len(result.gradients) == 2 * 7 * 4
    assert all(gradient.any() for gradient in expected.gradients.values())
    on_cpu = {name: gradient.cpu() for name, gradient in result.gradients.items()}
    assert_same(Results(result.loss.cpu(), on_cpu), expected, rtol)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("names", COMBINATIONS)
def test_gradients_of_adapters_are_plain_ones(names, family):
    """It catches a checkpoint that sees no input with a gradient, and a fused layer that wants its weight's."""
    assert_gradients_of_adapters(family, COMBINATIONS[names]())


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("names", COMPILED)
def test_gradients_of_adapters_in_compiled_blocks(names, family):
    torch._dynamo.reset()
    assert_gradients_of_adapters(family, COMPILED[names]())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels run on CUDA")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_of_adapters_with_liger(family, monkeypatch):
    pytest.importorskip("liger_kernel")
    modeling = sys.modules[type(tiny_model(family)).__module__]
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)  # stays exchanged otherwise
    torch._dynamo.reset()
    optimizations = [Liger(), GradientCheckpointing(), FusedLogprobs(chunk_size=8)]
    assert_gradients_of_adapters(family, optimizations, "cuda", rtol=1e-4)
