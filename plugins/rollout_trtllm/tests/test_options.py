"""Options, versions, the memory plan, and the explanation of a failed start; nothing here starts an engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlplug_engines.colocated import SHARED_NAMES, MemoryBefore
from rlplug_rollout_trtllm import plugin
from rlplug_rollout_trtllm.colocated import TRTLLMRollout
from rlplug_rollout_trtllm.environment import (
    NEEDED,
    VERSIONS,
    engine_environment,
    require_ray,
    visible_devices,
)
from rlplug_rollout_trtllm.options import RESERVED, TRTLLMOptions, check_text_only
from rlplug_rollout_trtllm.ray_rollout import TRTLLMRayRollout
from rlplug_rollout_trtllm.surface import LLM_ARGS

from rlplug.errors import ConfigError
from rlplug.interfaces import EngineMemory, EngineMemoryRequest, FP8Weights, Placement, PolicySpec
from rlplug.registry import Registry
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


def test_shared_names_are_the_engines_own_as_the_page_says() -> None:
    """It catches a shared name without an effect, and a row of the page that names another option."""
    values = {"gpu_memory_utilization": 0.7, "max_model_len": 100, "max_num_seqs": 7, "max_num_batched_tokens": 300}
    page = (Path(__file__).parents[3] / "docs" / "rollout-engines.md").read_text()
    own = {shared: getattr(TRTLLMOptions, attribute) for attribute, shared in SHARED_NAMES.items()}
    for shared, name in own.items():
        assert re.search(rf"^\| `{shared}`[^|]* \|[^|]*\| `{name}`", page, re.M), shared
    assert arguments(**values) == arguments(**{own[shared]: value for shared, value in values.items()})
    with pytest.raises(ConfigError, match=r"rollout\.max_num_batched_tokens is 99, .*\(rollout\.context_length\)"):
        arguments(max_num_batched_tokens=99)


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


def test_reserved_arguments_are_refused_with_a_reason() -> None:
    for name in RESERVED:
        with pytest.raises(ConfigError, match=rf"llm_args\.{name} cannot be set: "):
            arguments(llm_args={name: 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_seq_len": 5}, r"set rollout\.context_length instead"),
        ({"max_batch_size": 5}, r"set rollout\.max_batch_size instead"),
        ({"batch_wait_timeout_iter": 5}, "Did you mean 'batch_wait_timeout_iters'"),
        ({"model_kwargs": {"quantization_config": {}}}, "quantization_config cannot be set"),
    ],
)
def test_arguments_that_cannot_be_passed_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(llm_args=given)


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
        VERSIONS.require_module("tensorrt_llm")


@pytest.mark.parametrize(("version", "is_known"), [("1.4.0", False), ("1.2.9", False), ("1.3.0rc26", True)])
def test_versions_of_the_1_3_line_are_known(monkeypatch: pytest.MonkeyPatch, version: str, is_known: bool) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    if is_known:
        assert str(VERSIONS.require_module("tensorrt_llm")) == version
        return
    with pytest.raises(ConfigError, match=f"TensorRT-LLM {version} is installed"):
        VERSIONS.require_module("tensorrt_llm")


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


def test_engines_on_gpus_of_unknown_size_plan_nothing() -> None:
    assert TRTLLMRayRollout().plan_memory(SPEC, NEEDS) is None


def test_sizes_are_options_that_the_engine_takes() -> None:
    """Catches a name that is no option, and passes that are shorter than a prompt which is not cut."""
    for engine in (TRTLLMRollout(), TRTLLMRayRollout()):
        sizes = engine.size_options(SPEC, 100, 2048)
        assert sizes == {"max_batch_size": 100, "max_num_tokens": 4096, "cuda_graph_max_batch_size": 100}
    assert TRTLLMRollout(**sizes).size_options(SPEC, 100, 2048) == {}
    assert TRTLLMOptions(**sizes).arguments(SPEC, LLM_ARGS)["max_num_tokens"] == 4096
    cut = TRTLLMRollout(enable_chunked_prefill=True, disable_cuda_graph=True).size_options(SPEC, 100, 2048)
    assert cut == {"max_batch_size": 100, "max_num_tokens": 2048}


@pytest.mark.parametrize(
    ("weights_gib", "advice"), [(20, "model.memory.offload"), (2, "lower rollout.free_gpu_memory")]
)
def test_a_failed_start_says_what_to_set(weights_gib: int, advice: str) -> None:
    memory = MemoryBefore(total=80 << 30, free=16 << 30, trainer=50 << 30)
    assert advice in TRTLLMRollout().memory_advice(memory, weights_gib << 30, 4096).remedy


# ---- environment ----------------------------------------------------------------------------------------------------

CONTRACT = json.loads((Path(__file__).parent / "trtllm_contract.json").read_text())["environment"]
LAUNCHERS = {"PMI_RANK": "0", "PMIX_ID": "a", "MPI_X": "1", "OMPI_COMM_WORLD_SIZE": "8", "SLURM_JOB_ID": "77"}
TRAINERS = {"RANK": "3", "MASTER_ADDR": "h", "TORCHELASTIC_RUN_ID": "x", "PYTORCH_CUDA_ALLOC_CONF": "y"}


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**LAUNCHERS, **TRAINERS}.items():
        monkeypatch.setenv(name, value)
    for name in NEEDED:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")


@pytest.mark.usefixtures("trainers")
def test_an_engine_starts_in_the_environment_of_the_contract() -> None:
    with contextlib.suppress(ZeroDivisionError), engine_environment("4"):
        assert not [name for name in os.environ if re.match(CONTRACT["unset_before_start"], name)]
        assert all(os.environ[name] == value for name, value in (each.split("=") for each in CONTRACT["set"]))
        assert not TRAINERS.keys() & os.environ.keys()  # workers have no place of the trainer's
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
        raise ZeroDivisionError
    assert {name: os.environ[name] for name in (*LAUNCHERS, *TRAINERS)} == {**LAUNCHERS, **TRAINERS}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert os.environ["TLLM_DISABLE_MPI"] == "1"  # it is asked for at any time


@pytest.mark.usefixtures("trainers")
def test_devices_are_counted_among_those_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_devices(2, 2) == "6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices(2, 2) == "2,3"


def test_devices_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5ebe9f43")
    with pytest.raises(ConfigError, match="name GPUs by their index"):
        visible_devices(0, 1)
