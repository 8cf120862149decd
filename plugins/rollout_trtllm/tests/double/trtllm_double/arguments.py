"""What ``AsyncLLM`` takes: the contract's ``AsyncLLM.__init__``, the configurations, and ``environment``."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from trtllm_double.contract import CONTRACT, FP8, LLM
from trtllm_double.memory import SleepConfig

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class CapacitySchedulerPolicy(enum.StrEnum):
    """Members as in ``tensorrt_llm/llmapi/llm_args.py``; the contract names the class only."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


def _config_class(name: str, defaults: dict[str, Any]) -> type:
    """Make a class of keywords. As the real ones (pydantic, extra keys forbidden) it refuses unknown keywords.

    A value must be of its default's type, where that says one; ints pass for floats.
    """

    def check(self: Any) -> None:
        for key, default in defaults.items():
            value, kind = getattr(self, key), type(default)
            fits = isinstance(value, (int, float)) if kind is float else type(value) is kind
            if default is not None and not fits:
                raise ValueError(f"{name}.{key} must be a {kind.__name__}, and is {value!r}")

    fields = [(key, Any, dataclasses.field(default=default)) for key, default in defaults.items()]
    return dataclasses.make_dataclass(name, fields, kw_only=True, namespace={"__post_init__": check})


KvCacheConfig = _config_class("KvCacheConfig", CONTRACT["KvCacheConfig"])
CudaGraphConfig = _config_class("CudaGraphConfig", dict.fromkeys(CONTRACT["CudaGraphConfig"]))
SchedulerConfig = _config_class(
    "SchedulerConfig",
    dict.fromkeys(["capacity_scheduler_policy", "context_chunking_policy", "dynamic_batch_config"]),
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments that change what the double does, checked."""

    model: str
    dtype: torch.dtype
    world_size: int
    tensor_parallel_size: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_input_len: int | None
    is_dummy: bool
    kv_cache_config: Any
    sleep_config: SleepConfig | None
    quantization_config: dict[str, Any] | None
    config_overrides: dict[str, Any]
    enable_chunked_prefill: bool
    skip_tokenizer_init: bool
    extension: str


def check_environment() -> None:
    """Contract ``environment``: no variable of MPI or SLURM at start, and those of ``set`` with their values."""
    pattern = re.compile(CONTRACT["environment"]["unset_before_start"])
    for name in sorted(os.environ):
        if pattern.match(name):
            raise RuntimeError(f"the environment has {name}: unset what matches {pattern.pattern} before the start")
    for setting in CONTRACT["environment"]["set"]:
        name, _, value = setting.partition("=")
        if os.environ.get(name) != value:
            raise RuntimeError(f"the environment must have {setting}, and has {name}={os.environ.get(name)!r}")


def check_arguments(given: dict[str, Any]) -> Arguments:
    """Contract ``AsyncLLM.__init__``: ``kwargs_allowed`` and ``forbidden``.

    Raises:
        TypeError: No model, or a configuration of another class.
        ValueError: A keyword that is forbidden or unknown, or a value that the engine refuses.
    """
    for key in given:
        if key in LLM["forbidden"]:
            raise ValueError(f"AsyncLLM: {key} is forbidden: {LLM['note']}")
        if key not in LLM["kwargs_allowed"]:
            raise ValueError(f"AsyncLLM: unknown keyword {key}: extra inputs are not permitted")
    if "model" not in given:
        raise TypeError(f"AsyncLLM: no model: {LLM['note']}")
    if given.get("backend", "pytorch") != "pytorch":
        raise ValueError(f"AsyncLLM: backend must be 'pytorch', and is {given['backend']!r}")
    if not (Path(given["model"]) / "config.json").exists():
        raise ValueError(f"AsyncLLM: model={given['model']!r} is no folder of a model")
    overrides = dict(_instance(given, "model_kwargs", dict, {}))
    quantization = overrides.pop("quantization_config", None)
    is_dummy = str(given.get("load_format", "auto")).lower() == "dummy"
    if quantization is not None and not is_dummy:
        raise ValueError(f"AsyncLLM: {FP8['passed_as']} asks for load_format={FP8['load_format']!r}")
    config = AutoConfig.from_pretrained(given["model"])
    for key in overrides:
        if not hasattr(config, key):
            raise ValueError(f"AsyncLLM: model_kwargs.{key} is no setting of the model's config.json")
    sizes = {size: _positive(given, size, 1) for size in ("tensor_parallel_size", "pipeline_parallel_size")}
    _instance(given, "cuda_graph_config", CudaGraphConfig, None)
    _instance(given, "scheduler_config", SchedulerConfig, None)
    return Arguments(
        model=str(given["model"]),
        dtype=_dtype(given.get("dtype", "auto"), config),
        world_size=sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"],
        tensor_parallel_size=sizes["tensor_parallel_size"],
        max_batch_size=_positive(given, "max_batch_size", 2048),
        max_num_tokens=_positive(given, "max_num_tokens", 8192),
        max_seq_len=_positive(given, "max_seq_len", config.max_position_embeddings),
        max_input_len=_positive(given, "max_input_len", None),
        is_dummy=is_dummy,
        kv_cache_config=_instance(given, "kv_cache_config", KvCacheConfig, KvCacheConfig()),
        sleep_config=_instance(given, "sleep_config", SleepConfig, None),
        quantization_config=quantization,
        config_overrides=overrides,
        enable_chunked_prefill=bool(given.get("enable_chunked_prefill", False)),
        skip_tokenizer_init=bool(given.get("skip_tokenizer_init", False)),
        extension=given.get("ray_worker_extension_cls", "tensorrt_llm.llmapi.rlhf_utils.WorkerExtension"),
    )


def _instance(given: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    value = given.get(key)
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"AsyncLLM: {key} must be a {kind.__name__}, and is {value!r}")
    return default if value is None else value


def _positive(given: dict[str, Any], key: str, default: int | None) -> Any:
    value = given.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"AsyncLLM: {key} must be a positive int, and is {value!r}")
    return default if value is None else value


def _dtype(name: str, config: Any) -> torch.dtype:
    if name == "auto":
        return config.dtype or torch.float32
    if name not in DTYPES:
        raise ValueError(f"AsyncLLM: dtype must be 'auto' or one of {sorted(DTYPES)}, and is {name!r}")
    return DTYPES[name]
