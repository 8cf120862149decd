"""What ``AsyncLLM`` and its requests take: the contract's ``AsyncLLM.__init__``, configurations, ``environment``."""

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
from trtllm_double.sampling import SamplingParams

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
    tensor_parallel_size: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_input_len: int | None
    kv_cache_config: Any
    sleep_config: SleepConfig | None
    quantization_config: dict[str, Any] | None
    config_overrides: dict[str, Any]
    enable_chunked_prefill: bool
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
    if str(given.get("load_format", "auto")).lower() != FP8["load_format"]:
        raise ValueError(f"AsyncLLM: load_format={FP8['load_format']!r}: weights of the folder would stay beside FP8")
    if given.get("skip_tokenizer_init") is not True or given.get("pipeline_parallel_size", 1) != 1:
        raise ValueError("AsyncLLM: the double has no tokenizer (skip_tokenizer_init) and no pipeline")
    overrides = dict(_instance(given, "model_kwargs", dict, {}))
    quantization = overrides.pop("quantization_config", None)
    config = AutoConfig.from_pretrained(given["model"])
    for key in overrides:
        if not hasattr(config, key):
            raise ValueError(f"AsyncLLM: model_kwargs.{key} is no setting of the model's config.json")
    _instance(given, "cuda_graph_config", CudaGraphConfig, None)
    _instance(given, "scheduler_config", SchedulerConfig, None)
    return Arguments(
        model=str(given["model"]),
        dtype=_dtype(given.get("dtype", "auto"), config),
        tensor_parallel_size=_positive(given, "tensor_parallel_size", 1),
        max_batch_size=_positive(given, "max_batch_size", 2048),
        max_num_tokens=_positive(given, "max_num_tokens", 8192),
        max_seq_len=_positive(given, "max_seq_len", config.max_position_embeddings),
        max_input_len=_positive(given, "max_input_len", None),
        kv_cache_config=_instance(given, "kv_cache_config", KvCacheConfig, KvCacheConfig()),
        sleep_config=_instance(given, "sleep_config", SleepConfig, None),
        quantization_config=quantization,
        config_overrides=overrides,
        enable_chunked_prefill=bool(given.get("enable_chunked_prefill", False)),
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


def check_prompt(inputs: Any, vocabulary: int) -> tuple[int, ...]:
    """Return token ids; ValueError for anything else, or ids that the model lacks."""
    prompt = tuple(inputs)
    if not prompt or not all(type(token) is int and 0 <= token < vocabulary for token in prompt):
        raise ValueError(f"inputs must be token ids, ints below {vocabulary}: {prompt}")
    return prompt


def check_sampling(params: Any) -> None:
    """Refuse what needs a tokenizer.

    That the engine cannot detokenise without one is an error here; the real one returns no text.
    """
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, and is {type(params).__name__}")
    if params.detokenize:
        raise ValueError("detokenize=True, the default, and skip_tokenizer_init=True exclude each other")
    if params.end_id is None:
        raise ValueError("tokenizer is required to reset end_id if it is None: specify end_id")


def max_tokens(limits: Arguments, num_prompt: int, params: Any) -> int:
    """Return how many tokens a request may get: what it asks for (32 if it does not), or what the context has.

    Raises:
        ValueError: The prompt leaves no room, or is longer than ``max_input_len`` or ``max_num_tokens``.
    """
    room = limits.max_seq_len - num_prompt
    if room <= 0:
        raise ValueError(f"the prompt has {num_prompt} tokens, and max_seq_len={limits.max_seq_len}")
    if limits.max_input_len is not None and num_prompt > limits.max_input_len:
        raise ValueError(f"the prompt has {num_prompt} tokens, and max_input_len={limits.max_input_len}")
    if num_prompt > limits.max_num_tokens and not limits.enable_chunked_prefill:
        raise ValueError(f"the prompt has {num_prompt} tokens, and max_num_tokens={limits.max_num_tokens}")
    if type(params.max_tokens) is not int or params.max_tokens <= 0:
        raise ValueError(f"max_tokens must be above 0, and is {params.max_tokens}")
    return min(params.max_tokens, room)
