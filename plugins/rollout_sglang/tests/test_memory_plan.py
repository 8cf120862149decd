"""What the plugin says an engine will take, without SGLang and without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rlplug_rollout_sglang.colocated import KV_MARGIN, SGLangRollout
from rlplug_rollout_sglang.server import SGLangServerRollout

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


def test_servers_are_planned_on_their_own_gpus() -> None:
    assert SGLangServerRollout(gpus=[1, 2]).plan_memory(SPEC, NEEDS) == replace(planned(), own_gpus=2)
    assert SGLangServerRollout(urls=["http://127.0.0.1:30000"]).plan_memory(SPEC, NEEDS) is None


def test_sizes_are_options_that_sglang_takes() -> None:
    """Catches a name that is no option, and what contradicts an option that is set."""
    for engine in (SGLangRollout(), SGLangServerRollout(gpus=[1])):
        sizes = engine.size_options(SPEC, 100, 4096)
        assert sizes == {
            "max_running_requests": 100,
            "chunked_prefill_size": 4096,
            "cuda_graph_max_batch_size": 100,
        }
    assert SGLangRollout(**sizes).size_options(SPEC, 100, 4096) == {}
    listed = SGLangRollout(cuda_graph_batch_sizes=[1, 64]).size_options(SPEC, 100, 4096)
    assert listed["cuda_graph_batch_sizes"] == [1, 64, 100]
    bare = SGLangRollout(disable_cuda_graph=True, chunked_prefill_size=-1).size_options(SPEC, 100, 4096)
    assert bare == {"max_running_requests": 100}
