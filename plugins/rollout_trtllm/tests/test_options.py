"""Options, versions, the memory plan, and the explanation of a failed start; nothing here starts an engine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rlplug_rollout_trtllm import plugin
from rlplug_rollout_trtllm.colocated import TRTLLMRollout
from rlplug_rollout_trtllm.memory import start_failure
from rlplug_rollout_trtllm.options import RESERVED, TRTLLMOptions, check_text_only
from rlplug_rollout_trtllm.ray_rollout import TRTLLMRayRollout
from rlplug_rollout_trtllm.surface import LLM_ARGS
from rlplug_rollout_trtllm.versions import require_ray, require_tensorrt_llm

from rlplug.errors import ConfigError
from rlplug.interfaces import EngineMemory, EngineMemoryRequest, FP8Weights, Placement, PolicySpec
from rlplug.registry import Registry
from rlplug.rollout.engines import MemoryBefore
from rlplug.types import GIB

SPEC = PolicySpec("folder", torch.bfloat16, eos_token_ids=(1, 7), pad_token_id=0, max_context=4096)
NEEDS = EngineMemoryRequest(
    int(80 * GIB), 1_000_000_000, kv_bytes_per_token=100_000, completions=64, longest=512, vocab_size=9
)


def arguments(policy: PolicySpec = SPEC, **options: Any) -> dict[str, Any]:
    return TRTLLMOptions(**options).arguments(policy, LLM_ARGS)


# ---- options --------------------------------------------------------------------------------------------------------


def test_what_every_engine_gets() -> None:
    made = arguments()
    expected = {"model": "folder", "backend": "pytorch", "load_format": "dummy", "skip_tokenizer_init": True}
    assert {name: made[name] for name in expected} == expected
    assert made["dtype"] == "bfloat16"
    assert made["max_seq_len"] == made["max_input_len"] == 4096
    assert set(made) <= LLM_ARGS


def test_what_is_null_is_left_to_the_engine() -> None:
    made = arguments()
    left = {"max_batch_size", "max_num_tokens", "scheduler_config", "moe_expert_parallel_size", "model_kwargs"}
    assert not left & set(made)
    assert set(made["kv_cache_config"]) == {"free_gpu_memory_fraction", "dtype", "enable_block_reuse"}
    assert made["cuda_graph_config"] == {"enable_padding": True}


def test_options_become_arguments() -> None:
    made = arguments(
        free_gpu_memory_fraction=0.7,
        kv_cache_dtype="fp8",
        enable_block_reuse=False,
        tokens_per_block=64,
        context_length=100,
        max_batch_size=7,
        max_num_tokens=300,
        scheduler_policy="max_utilization",
        cuda_graph_batch_sizes=[1, 8],
        tensor_parallel_size=4,
        moe_tensor_parallel_size=2,
        moe_expert_parallel_size=2,
        llm_args={"allreduce_strategy": "NCCL"},
    )
    assert made["kv_cache_config"] == {
        "free_gpu_memory_fraction": 0.7,
        "dtype": "fp8",
        "enable_block_reuse": False,
        "tokens_per_block": 64,
    }
    assert made["cuda_graph_config"] == {"enable_padding": True, "batch_sizes": [1, 8]}
    assert made["scheduler_config"] == {"capacity_scheduler_policy": "max_utilization"}
    expected = {"max_seq_len": 100, "max_batch_size": 7, "max_num_tokens": 300, "tensor_parallel_size": 4}
    expected |= {"moe_tensor_parallel_size": 2, "moe_expert_parallel_size": 2}
    assert {name: made[name] for name in expected} == expected
    assert made["allreduce_strategy"] == "NCCL"


def test_no_graphs_is_none_and_not_left_out() -> None:
    assert arguments(disable_cuda_graph=True)["cuda_graph_config"] is None


def test_a_pass_holds_the_longest_prompt() -> None:
    long = replace(SPEC, max_context=20_000)
    assert arguments(long)["max_num_tokens"] == 20_000
    assert "max_num_tokens" not in arguments(long, enable_chunked_prefill=True)
    with pytest.raises(ConfigError, match=r"max_num_tokens is 9000.*enable_chunked_prefill"):
        arguments(long, max_num_tokens=9000)


def test_fp8_becomes_a_quantization_config() -> None:
    fp8 = FP8Weights(quantized=("model.a.weight",), kept=("lm_head.weight",))
    made = arguments(replace(SPEC, fp8=fp8), llm_args={"model_kwargs": {"rope_theta": 1.0}})
    assert made["model_kwargs"] == {"rope_theta": 1.0, "quantization_config": fp8.quantization_config()}


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_arguments_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"llm_args\.{name} cannot be set: "):
        arguments(llm_args={name: 1})


def test_arguments_with_an_option_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"set rollout\.context_length instead"):
        arguments(llm_args={"max_seq_len": 5})
    with pytest.raises(ConfigError, match=r"set rollout\.max_batch_size instead"):
        arguments(llm_args={"max_batch_size": 5})


def test_unknown_arguments_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'batch_wait_timeout_iters'"):
        arguments(llm_args={"batch_wait_timeout_iter": 5})


def test_a_quantization_config_of_ones_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization_config cannot be set"):
        arguments(llm_args={"model_kwargs": {"quantization_config": {}}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"free_gpu_memory_fraction": 1.0}, "free_gpu_memory_fraction is 1.0"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"cuda_graph_batch_sizes": []}, "cuda_graph_batch_sizes is"),
        ({"cuda_graph_batch_sizes": [2], "cuda_graph_max_batch_size": 4}, "names them all"),
        ({"tensor_parallel_size": 4, "moe_expert_parallel_size": 3}, "is not tensor_parallel_size 4"),
    ],
)
def test_impossible_values_are_refused_by_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TRTLLMOptions(**options)


def test_no_engines_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_engines is 0"):
        TRTLLMRayRollout(num_engines=0)


def test_a_model_with_images_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="vision_config: images"):
        check_text_only(replace(SPEC, path=str(tmp_path)))
    for engine in (TRTLLMRollout(), TRTLLMRayRollout()):
        with pytest.raises(ConfigError, match="images"):
            engine.check(replace(SPEC, path=str(tmp_path)))


def test_capabilities_follow_options() -> None:
    assert TRTLLMRollout().capabilities.streaming
    assert not TRTLLMRollout(tensor_parallel_size=2).capabilities.streaming
    assert not TRTLLMRollout(enable_block_reuse=False).capabilities.multi_turn
    assert not TRTLLMRollout().capabilities.in_flight_update
    assert TRTLLMRollout(tensor_parallel_size=2).ranks_per_engine == 2


def test_the_plugin_registers_both() -> None:
    registry = Registry()
    plugin.rlplug_register_rollouts(registry)
    assert set(registry.names("rollouts")) == {"TRTLLMRollout", "TRTLLMRayRollout"}


# ---- what must be installed -----------------------------------------------------------------------------------------


def test_a_cpu_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="TRTLLMRollout, which needs a GPU"):
        TRTLLMRollout().start(SPEC, Placement(torch.device("cpu"), rank=0, world_size=1))


def test_a_missing_engine_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(ConfigError, match="NVIDIA's TensorRT-LLM container"):
        require_tensorrt_llm()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        __version__ = "1.4.0"

    monkeypatch.setitem(sys.modules, "tensorrt_llm", Other)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"TensorRT-LLM 1\.4\.0 is installed"):
        require_tensorrt_llm()


def test_a_release_candidate_of_the_line_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        __version__ = "1.3.0rc26"

    monkeypatch.setitem(sys.modules, "tensorrt_llm", Other)  # type: ignore[arg-type]
    assert str(require_tensorrt_llm()) == "1.3.0rc26"


def test_a_missing_ray_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'rlplug-rollout-trtllm\[ray\]'"):
        require_ray()


# ---- memory ---------------------------------------------------------------------------------------------------------


def planned(**options: Any) -> EngineMemory:
    memory = TRTLLMRollout(**options).plan_memory(SPEC, NEEDS)
    assert memory is not None
    return memory


def test_the_cache_is_a_share_of_what_weights_and_passes_leave() -> None:
    memory = planned(free_gpu_memory_fraction=0.5)
    assert memory.weights == 2 * NEEDS.parameters
    assert memory.kv_cache == pytest.approx(0.5 * (NEEDS.device_bytes - memory.weights - memory.other), rel=1e-6)
    assert memory.can_sleep
    assert memory.least_kv_cache is None  # no share of the whole GPU is recommended


def test_tensor_parallel_ranks_share_weights_and_cache() -> None:
    whole, half = planned(), planned(tensor_parallel_size=2)
    assert half.weights == whole.weights // 2
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token // 2
    assert planned(kv_cache_dtype="fp8").kv_bytes_per_token == whole.kv_bytes_per_token // 2


def test_engines_on_other_gpus_plan_nothing() -> None:
    assert TRTLLMRayRollout().plan_memory(SPEC, NEEDS) is None


@pytest.mark.parametrize(("weights_gib", "advice"), [(20, "model.offload"), (2, "lower rollout.free_gpu_memory")])
def test_a_failed_start_says_who_holds_the_memory(weights_gib: int, advice: str) -> None:
    memory = MemoryBefore(total=80 << 30, free=16 << 30, trainer=50 << 30)
    message = str(start_failure("out of memory", memory, 0.5, weights_gib << 30))
    assert "Of the GPU's 80.0 GiB: 50.0 the trainer's tensors" in message
    assert advice in message
