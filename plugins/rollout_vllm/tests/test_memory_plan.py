"""What the plugin says an engine will take, without vLLM and without a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rlplug_devkit.models import make_model_folder
from rlplug_rollout_vllm.colocated import VLLMRollout
from rlplug_rollout_vllm.options import graph_sizes
from rlplug_rollout_vllm.server import VLLMServerRollout

from rlplug.interfaces import AdapterWeights, EngineMemory, EngineMemoryRequest, PolicySpec
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
    memory = VLLMRollout(**options).plan_memory(spec, NEEDS)
    assert memory is not None
    return memory


def test_a_share_is_weights_passes_and_the_cache_that_is_left() -> None:
    """Measured with vLLM 0.26: 55.6 GiB awake, 0.5 asleep, a cache of 282,704 tokens."""
    memory = planned(gpu_memory_utilization=0.4)
    assert memory.awake / GIB == pytest.approx(55.6, rel=0.01)
    assert memory.asleep / GIB == 0.5
    assert memory.kv_cache / memory.kv_bytes_per_token == pytest.approx(282_704, rel=0.001)
    assert memory.can_sleep


def test_adapters_are_held_as_they_came_and_as_kernels_read_them(tmp_path: Path) -> None:
    make_model_folder("adapters", tmp_path)
    modules = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
    serving = replace(SPEC, path=str(tmp_path), adapters=AdapterWeights(4, 8.0, modules))
    num_bytes = 2 * 4 * ((256 + 256) + (384 + 256))  # bfloat16, of q_proj [256, 256] and down_proj [256, 384]
    assert planned(serving).weights - planned().weights == 2 * num_bytes
    assert planned(serving).asleep - planned().asleep == num_bytes


def test_the_cache_holds_one_sequence_of_the_engine() -> None:
    assert planned().least_kv_cache == 8192 * 196_608
    assert planned(max_model_len=1024).least_kv_cache == 1024 * 196_608
    assert planned(gpu_memory_utilization=0.01).kv_cache == planned().least_kv_cache


def test_a_cache_of_a_given_size_is_no_share() -> None:
    memory = planned(kv_cache_gib=8)
    assert memory.kv_cache == 8 * GIB
    assert memory.least_kv_cache is None


def test_servers_are_planned_on_their_own_gpus() -> None:
    """Catches servers that count as the trainer's, and a plan of servers that somebody else has started."""
    memory = VLLMServerRollout(gpus=[1, 2], gpu_memory_utilization=0.4).plan_memory(SPEC, NEEDS)
    assert memory == replace(planned(gpu_memory_utilization=0.4), own_gpus=2)
    assert VLLMServerRollout(urls=["http://127.0.0.1:8000"]).plan_memory(SPEC, NEEDS) is None


def test_sizes_are_options_that_vllm_takes() -> None:
    """Catches a name that is no option, graphs that end below the requests, and what its 0.26 refuses."""
    for engine in (VLLMRollout(), VLLMServerRollout(gpus=[1])):
        sizes = engine.size_options(SPEC, 100, 8192)
        assert sizes["max_num_seqs"] == 100
        assert sizes["max_num_batched_tokens"] == 8200
        graphs = sizes["cudagraph_capture_sizes"]
        assert (graphs[:5], graphs[-2:]) == ([1, 2, 4, 8, 16], [96, 100])
    assert VLLMRollout(**sizes).size_options(SPEC, 100, 8192) == {}
    short = VLLMRollout(max_model_len=8).size_options(SPEC, 64, 2048)
    assert short["max_num_batched_tokens"] == 64 * 8
    whole = VLLMRollout(enable_chunked_prefill=False).size_options(SPEC, 64, 2048)
    assert whole["max_num_batched_tokens"] == SPEC.max_context
    assert "cudagraph_capture_sizes" not in VLLMRollout(enforce_eager=True).size_options(SPEC, 64, 2048)
    gaps = [after / before for before, after in pairwise(graph_sizes(2048)) if before >= 64]
    assert max(gaps) <= 1.125
    assert VLLMServerRollout(urls=["http://127.0.0.1:8000"]).size_options(SPEC, 100, 8192) == {}
