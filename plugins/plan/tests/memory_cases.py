"""Models and runs of the memory plan's tests: the shapes of benchmarks/shapes.py, and what was measured with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from rlplug_plan.inputs import MemoryInputs, ModelInputs, Sizes
from rlplug_plan.model_shape import ModelShape
from rlplug_plan.remedies import find_remedies
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from rlplug.interfaces import ActivationTraits, EngineMemory
from rlplug.interfaces.memory_plan import GPU
from rlplug.types import GIB, MeshSizes

H200 = GPU(total=int(139.8 * GIB), free=int(139.8 * GIB), is_here=False)
EAGER = ActivationTraits()
COMPILED = ActivationTraits(fused_pointwise=True)
FUSED = ActivationTraits(fused_pointwise=True, logits_chunk=4096)


def shape_of(config: Any) -> ModelShape:
    with torch.device("meta"):
        return ModelShape.of(AutoModelForCausalLM.from_config(config))


LLAMA = shape_of(
    LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=8192,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
)
QWEN = shape_of(
    Qwen3Config(
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        tie_word_embeddings=False,
    )
)
QWEN_4B = shape_of(
    Qwen3Config(
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=9728,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
)
QWEN_VOCABULARY = shape_of(
    Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=3072,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
)


def make_facts(
    shape: ModelShape = LLAMA,
    rows: int = 128,
    prompt: int = 256,
    completion: int = 512,
    traits: ActivationTraits = FUSED,
    **others: Any,
) -> MemoryInputs:
    """Return a run of ``rows`` completions a data rank, each as long as possible, with AdamW."""
    num_gpus = others.pop("num_gpus", 1)
    mesh = others.setdefault("mesh", MeshSizes(1, num_gpus, 1, 1))
    sizes = Sizes(
        rows * mesh.data_size,
        rows * mesh.data_size,
        prompt + completion,
        completion,
        others.pop("max_tokens", {"update": 16384, "forward": 32768}),
        sequence_size=mesh.sequence,
        data_size=mesh.data_size,
    )
    policy = ModelInputs(shape, traits, 8.0, tensor=mesh.tensor)
    return MemoryInputs(**({"gpu": H200, "policy": policy, "sizes": sizes} | others))


def make_engine(share: float = 0.4, shape: ModelShape = LLAMA, longest: int = 768, **others: Any) -> EngineMemory:
    """Return what vLLM takes of an H200."""
    weights, other = 2 * shape.parameters, GIB
    values: dict[str, Any] = {
        "weights": weights,
        "kv_cache": int(share * H200.total) - weights - other,
        "other": other,
        "asleep": GIB // 2,
        "kv_bytes_per_token": 2 * shape.kv_elements,
        "least_kv_cache": longest * 2 * shape.kv_elements,
    }
    return EngineMemory(**(values | others))


def on(gib: float, facts: MemoryInputs) -> MemoryInputs:
    """Return the run on GPUs of which ``gib`` can be planned with."""
    total = round(gib / 0.9 * GIB)
    return replace(facts, gpu=GPU(total, total, is_here=False))


def smallest_change(facts: MemoryInputs) -> list[str]:
    """Return the keys of the first remedy; nothing where there is none."""
    remedies = find_remedies(facts)
    return [setting.text for setting in remedies[0].settings] if remedies else []


AWAKE_SIZES: dict[str, Any] = {"engine": make_engine(0.4), "engine_can_sleep": True, "completions": 1024}
"""An engine that stays awake, of more completions than its cache holds."""
