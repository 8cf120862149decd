"""What the plugin says an engine will take, without SGLang and without a GPU."""

from __future__ import annotations

import pytest
import torch
from rlplug_rollout_sglang.colocated import KV_MARGIN, SGLangRollout

from rlplug.interfaces import EngineMemory, EngineMemoryRequest, PolicySpec
from rlplug.types import GIB

SPEC = PolicySpec("model", torch.bfloat16, (2,), 2, max_context=8192)
NEEDS = EngineMemoryRequest(
    device_bytes=int(139.8 * GIB),
    parameters=1_711_376_384,
    kv_bytes_per_token=196_608,
    completions=128,
    longest=768,
    vocab_size=49152,
)


def planned(spec: PolicySpec = SPEC, **options: object) -> EngineMemory:
    return SGLangRollout(**options).plan_memory(spec, NEEDS)


def test_a_share_is_weights_and_cache_with_passes_beside_it() -> None:
    memory = planned(mem_fraction_static=0.4)
    assert (memory.weights + memory.kv_cache) / GIB == pytest.approx(0.4 * 139.8, rel=1e-6)
    assert memory.weights == 2 * NEEDS.parameters
    assert memory.awake > memory.weights + memory.kv_cache
    assert memory.can_sleep


def test_the_cache_holds_one_sequence_of_the_engine() -> None:
    assert planned().least_kv_cache == (8192 + KV_MARGIN) * 196_608
    assert planned(context_length=1024).least_kv_cache == (1024 + KV_MARGIN) * 196_608
    assert planned(mem_fraction_static=0.01).kv_cache == planned().least_kv_cache


def test_tokens_of_the_cache_are_a_limit() -> None:
    assert planned(max_total_tokens=20_000).kv_cache == 20_000 * 196_608
    assert planned(max_total_tokens=10**9).kv_cache == planned().kv_cache
