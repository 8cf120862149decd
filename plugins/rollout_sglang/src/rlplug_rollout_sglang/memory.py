"""What SGLang takes of a GPU; and who holds its memory when SGLang does not start, and what to set."""

from __future__ import annotations

from typing import Final

import torch

from rlplug.errors import RunError
from rlplug.interfaces import EngineMemory, EngineMemoryRequest, PolicySpec
from rlplug.rollout.engines import MemoryBefore
from rlplug.types import GIB
from rlplug_rollout_sglang.options import SGLangOptions

PASS_BYTES: Final = int(2.0 * GIB)
"""Activations of its passes, CUDA graphs, and its processes' CUDA contexts: an estimate, not measured."""
ASLEEP_BYTES: Final = int(1.5 * GIB)
"""What stays when it sleeps, CUDA graphs among it: an estimate, not measured."""

KV_MARGIN: Final = 256
"""Tokens of the KV cache beyond the longest sequence: SGLang counts whole pages, and keeps one of them free."""


def planned_memory(options: SGLangOptions, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
    """Return what an engine takes of each of its GPUs, at most.

    ``mem_fraction_static`` is a share of what is free when it starts; here, as if all of the GPU were.
    """
    size = options.tensor_parallel_size
    dtype = policy.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    cache_itemsize = 1 if options.kv_cache_dtype.startswith("fp8") else dtype.itemsize
    kv_bytes_per_token = needs.kv_bytes_per_token * cache_itemsize // policy.dtype.itemsize // size
    weights = needs.weight_bytes(dtype.itemsize) // size
    least = (options.longest(policy) + KV_MARGIN) * kv_bytes_per_token
    kv_cache = max(int(options.mem_fraction_static * needs.device_bytes) - weights, least)
    if options.max_total_tokens is not None:
        kv_cache = min(kv_cache, options.max_total_tokens * kv_bytes_per_token)
    return EngineMemory(
        weights=weights,
        kv_cache=kv_cache,
        other=PASS_BYTES,
        asleep=ASLEEP_BYTES,
        kv_bytes_per_token=kv_bytes_per_token,
        least_kv_cache=least,
        share_key="mem_fraction_static",
        share_has_passes=False,
    )


def check_cache(kv_cache_tokens: int, longest: int) -> None:
    """Stop the run unless the KV cache holds the longest sequence: SGLang would cut completions short, and say nothing.

    Raises:
        RunError: It does not.
    """
    if kv_cache_tokens < longest + KV_MARGIN:
        raise RunError(
            f"SGLang has a KV cache of {kv_cache_tokens:,} tokens, and one sequence may need {longest + KV_MARGIN:,}: "
            "raise rollout.mem_fraction_static (or max_total_tokens), or lower context_length to the longest prompt "
            "and completion of the run."
        )


def start_failure(problem: str, memory: MemoryBefore, share: float, weight_bytes: int) -> RunError:
    """Say why SGLang did not start.

    Args:
        problem: What it said.
        memory: Of its GPU before.
        share: ``mem_fraction_static``.
        weight_bytes: Of the model on this GPU.
    """
    asked = share * memory.free
    sizes = {
        "the trainer's tensors": memory.trainer,
        "other programs and CUDA": memory.total - memory.free - memory.trainer,
        "free": memory.free,
        f"of that for rollout.mem_fraction_static {share:g}": asked,
        "of that for weights": weight_bytes,
    }
    text = f"SGLang did not start: {problem}\nOf the GPU's {memory.total / GIB:.1f} GiB: "
    text += ", ".join(f"{size / GIB:.1f} {what}" for what, size in sizes.items()) + ". "
    if weight_bytes + PASS_BYTES > memory.free:
        text += "Free memory with model.offload, or share the model between GPUs with rollout.tensor_parallel_size."
    elif weight_bytes > 0.9 * asked:
        text += "Raise rollout.mem_fraction_static, or share the model between GPUs with tensor_parallel_size."
    else:
        text += (
            "If it ran out of memory: lower rollout.mem_fraction_static, which leaves more for passes and CUDA graphs, "
            "or chunked_prefill_size, or cuda_graph_max_batch_size."
        )
    return RunError(text)
