"""The names of TensorRT-LLM that this plugin uses, and how an installed engine differs from them.

A small copy of the contract of the 1.3 line, which was read in its public sources and documentation.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

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

METHODS: Final = (
    *("setup_async()", "generate_async(inputs, sampling_params)", "release(tags)", "resume(tags)"),
    *("update_weights(weights)", "collective_rpc(method, args, unique_reply_rank)"),
    *("pause_generation()", "resume_generation()", "shutdown()"),
)
"""Methods of ``AsyncLLM``, with the parameters that are given."""

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

SYMBOLS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "tensorrt_llm": {"AsyncLLM": (*PLACING, *METHODS), "SamplingParams": SAMPLING},
    "tensorrt_llm.llmapi": {
        "KvCacheConfig": tuple(DEFAULTS["KvCacheConfig"]),
        "CudaGraphConfig": CUDA_GRAPHS,
        "SchedulerConfig": ("capacity_scheduler_policy",),
        "CapacitySchedulerPolicy": ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT"),
    },
    "tensorrt_llm.llmapi.llm_args": {"SleepConfig": ("restore_modes",), "ExecutorMemoryType": MEMORY_TYPES},
    "tensorrt_llm.llmapi.rlhf_utils": {"WorkerExtension": ("update_weights()",)},
    "tensorrt_llm._torch.utils": {"get_device_uuid": ()},
}
"""Names by module, each with its keywords, fields, members and methods that the plugin uses."""

EXTENSION: Final = "rlplug_rollout_trtllm.worker_extension.RLPlugWorkerExtension"
"""What the engine's workers load, by name: a subclass of its ``WorkerExtension``."""


def differences() -> list[str]:
    """Return in words how the installed TensorRT-LLM differs from these names; an empty list where it does not."""
    found: list[str] = []
    for module, symbols in SYMBOLS.items():
        try:
            imported = importlib.import_module(module)
        except ImportError as problem:
            found.append(f"no module {module}: {problem}")
            continue
        for name, members in symbols.items():
            symbol = getattr(imported, name, None)
            found += [f"{module} has no {name}"] if symbol is None else _of_symbol(name, symbol, members)
    return found


def argument_names() -> set[str]:
    """Return the names of the engine's arguments: those of the contract, and those that the installed one lists.

    Where TensorRT-LLM is not installed, as on a trainer's host whose engines are elsewhere, those of the contract.
    """
    is_installed = importlib.util.find_spec("tensorrt_llm") is not None
    return set(LLM_ARGS) | (_installed_arguments() or set() if is_installed else set())


def _installed_arguments() -> set[str] | None:
    """Return the arguments that the installed engine itself lists; ``None`` where it has no such list."""
    arguments = getattr(importlib.import_module("tensorrt_llm.llmapi.llm_args"), "TorchLlmArgs", None)
    return None if arguments is None else set(arguments.model_fields)


def _of_symbol(name: str, symbol: Any, members: Collection[str]) -> Iterator[str]:
    for member in members:
        method, is_method, parameters = member.rstrip(")").partition("(")
        if not is_method:
            yield from () if _has(symbol, member) else (f"{name} has no {member!r}",)
        elif (found := getattr(symbol, method, None)) is None:
            yield f"{name} has no method {method}"
        else:
            yield from (f"{name}.{method} takes no {p!r}" for p in parameters.split(", ") if p and not _has(found, p))
    if name == "AsyncLLM" and (known := _installed_arguments()) is not None:
        yield from (f"AsyncLLM takes no argument {argument!r}" for argument in sorted(LLM_ARGS - known))
    fresh = symbol() if name in DEFAULTS else None
    for field, expected in DEFAULTS.get(name, {}).items():
        if (default := getattr(fresh, field, expected)) != expected:
            yield f"{name}.{field} is {default!r} by default, and was {expected!r}"


def _has(symbol: Any, name: str) -> bool:
    """Say whether an enumeration has a member, by its name or value, or a class or function takes a keyword."""
    if isinstance(symbol, enum.EnumMeta):
        members: Collection[Any] = list(symbol)
        return any(name in (member.name, member.value) for member in members)
    if hasattr(symbol, "model_fields"):
        return name in symbol.model_fields
    parameters = inspect.signature(symbol).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
