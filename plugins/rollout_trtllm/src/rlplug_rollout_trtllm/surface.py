"""What of TensorRT-LLM this plugin uses by name, and how an installed one differs from that.

A small copy of the contract of the 1.3 line, which was read in its public sources and documentation.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

SYMBOLS: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorrt_llm": ("AsyncLLM", "SamplingParams"),
    "tensorrt_llm.llmapi": ("KvCacheConfig", "CudaGraphConfig", "SchedulerConfig", "CapacitySchedulerPolicy"),
    "tensorrt_llm.llmapi.llm_args": ("SleepConfig", "ExecutorMemoryType"),
    "tensorrt_llm.llmapi.rlhf_utils": ("WorkerExtension",),
    "tensorrt_llm._torch.utils": ("get_device_uuid",),
}
"""By module."""

PLACING: Final = ("placement_groups", "placement_bundle_indices", "per_worker_gpu_share")
"""Keywords of ``AsyncLLM`` itself, beside those of its arguments."""

LLM_ARGS: Final = frozenset(
    {
        *("model", "backend", "dtype", "load_format", "model_kwargs", "skip_tokenizer_init", "trust_remote_code"),
        *("tensor_parallel_size", "pipeline_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size"),
        *("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len"),
        *("kv_cache_config", "cuda_graph_config", "scheduler_config", "moe_config", "sleep_config"),
        *("enable_chunked_prefill", "disable_overlap_scheduler", "allreduce_strategy", "sampler_type"),
        *("batch_wait_timeout_iters", "batch_wait_max_tokens_ratio", "ray_worker_extension_cls"),
    }
)
"""Arguments of an engine."""

METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "setup_async": (),
    "generate_async": ("inputs", "sampling_params"),
    "release": ("tags",),
    "resume": ("tags",),
    "update_weights": ("weights",),
    "collective_rpc": ("method", "args", "unique_reply_rank"),
    "pause_generation": (),
    "resume_generation": (),
    "shutdown": (),
}
"""Of ``AsyncLLM``, with the parameters that are given."""

SAMPLING: Final = (
    *("max_tokens", "temperature", "top_p", "top_k", "n", "seed", "end_id", "pad_id", "stop_token_ids"),
    *("include_stop_str_in_output", "detokenize", "logprobs", "logprobs_mode", "ignore_eos"),
)
"""Fields of ``SamplingParams``."""

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "SamplingParams": {"max_tokens": 32, "n": 1, "detokenize": True, "logprobs": None},
    "KvCacheConfig": {
        "enable_block_reuse": True,
        "free_gpu_memory_fraction": 0.9,
        "dtype": "auto",
        "tokens_per_block": 32,
    },
}
"""Defaults as the plugin knows them. It sets all but ``tokens_per_block`` itself."""

CUDA_GRAPHS: Final = ("batch_sizes", "max_batch_size", "enable_padding")

SLEEPING_WEIGHTS: Final = "model_weights"
SLEEPING_CACHE: Final = "kv_cache"
MEMORY_TYPES: Final = ("model", "model_extra", SLEEPING_WEIGHTS, SLEEPING_CACHE, "executor_extra", "sampler")
"""Members of ``ExecutorMemoryType``, by value, that a model has without drafts and grammars."""

EXTENSION: Final = "rlplug_rollout_trtllm.worker_extension.RLPlugWorkerExtension"
"""What the engine's workers load, by name: a subclass of its ``WorkerExtension``."""


def differences() -> list[str]:
    """Return in words how the installed TensorRT-LLM differs from these names; an empty list where it does not."""
    missing = list(_missing_symbols())
    if missing:  # what follows would fail on them
        return missing
    return [*_of_the_engine(), *_of_the_configurations(), *_of_the_memory_types()]


def _symbol(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _missing_symbols() -> Iterator[str]:
    for module, names in SYMBOLS.items():
        try:
            found = importlib.import_module(module)
        except ImportError as problem:
            yield f"no module {module}: {problem}"
            continue
        yield from (f"{module} has no {name}" for name in names if not hasattr(found, name))


def _of_the_engine() -> Iterator[str]:
    engine = _symbol("tensorrt_llm", "AsyncLLM")
    for name, parameters in METHODS.items():
        method = getattr(engine, name, None)
        if method is None:
            yield f"AsyncLLM has no method {name}"
            continue
        yield from (f"AsyncLLM.{name} takes no {p!r}" for p in parameters if not _takes(method, p))
    yield from (f"AsyncLLM takes no {name!r}" for name in PLACING if not _takes(engine.__init__, name))
    known = installed_arguments()
    if known is not None:
        yield from (f"AsyncLLM takes no argument {name!r}" for name in sorted(LLM_ARGS - set(known)))
    extension = _symbol("tensorrt_llm.llmapi.rlhf_utils", "WorkerExtension")
    if not hasattr(extension, "update_weights"):
        yield "WorkerExtension has no method update_weights"


def installed_arguments() -> Collection[str] | None:
    """Return the arguments that the installed engine itself lists; ``None`` where it has no such list."""
    arguments = getattr(importlib.import_module("tensorrt_llm.llmapi.llm_args"), "TorchLlmArgs", None)
    return None if arguments is None else set(arguments.model_fields)


def _of_the_configurations() -> Iterator[str]:
    sampling = _symbol("tensorrt_llm", "SamplingParams")
    cache = _symbol("tensorrt_llm.llmapi", "KvCacheConfig")
    graphs = _symbol("tensorrt_llm.llmapi", "CudaGraphConfig")
    yield from _lacking(sampling, SAMPLING)
    yield from _lacking(cache, DEFAULTS["KvCacheConfig"])
    yield from _lacking(graphs, CUDA_GRAPHS)
    yield from _lacking(_symbol("tensorrt_llm.llmapi.llm_args", "SleepConfig"), ("restore_modes",))
    for kind in (sampling, cache):
        fresh = kind()
        for name, expected in DEFAULTS[kind.__name__].items():
            found = getattr(fresh, name, expected)
            if found != expected:
                yield f"{kind.__name__}.{name} is {found!r} by default, and was {expected!r}"


def _lacking(kind: Any, names: Collection[str]) -> Iterator[str]:
    yield from (f"{kind.__name__} has no field {name!r}" for name in names if not _has_field(kind, name))


def _has_field(kind: Any, name: str) -> bool:
    if hasattr(kind, "model_fields"):
        return name in kind.model_fields
    if dataclasses.is_dataclass(kind):
        return name in {field.name for field in dataclasses.fields(kind)}
    return _takes(kind.__init__, name)


def _of_the_memory_types() -> Iterator[str]:
    known = {member.value for member in _symbol("tensorrt_llm.llmapi.llm_args", "ExecutorMemoryType")}
    yield from (f"ExecutorMemoryType has no {name!r}" for name in MEMORY_TYPES if name not in known)


def _takes(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
