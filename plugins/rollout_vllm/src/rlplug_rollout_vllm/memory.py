"""What vLLM takes of a GPU; and who holds its memory when vLLM does not start, and what to set."""

from __future__ import annotations

from typing import Final

import torch

from rlplug.errors import RunError
from rlplug.interfaces import EngineMemory, EngineMemoryRequest, PolicySpec
from rlplug.rollout.engines import MemoryBefore
from rlplug.types import GIB
from rlplug_rollout_vllm.options import VLLMOptions

PASS_BYTES: Final = int(0.96 * GIB)
"""Activations of its passes and CUDA graphs: measured with vLLM 0.26, a policy of 1.7B and the options' defaults."""
ASLEEP_BYTES: Final = GIB // 2
"""What stays when it sleeps, measured in the same run."""


def planned_memory(options: VLLMOptions, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
    """Return what an engine takes of each of its GPUs; the KV cache is what ``gpu_memory_utilization`` leaves."""
    size = options.tensor_parallel_size
    dtype = policy.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    cache_itemsize = 1 if options.kv_cache_dtype.startswith("fp8") else dtype.itemsize
    kv_bytes_per_token = needs.kv_bytes_per_token * cache_itemsize // policy.dtype.itemsize // size
    weights = needs.weight_bytes(dtype.itemsize) // size
    longest = policy.max_context if options.max_model_len is None else min(options.max_model_len, policy.max_context)
    least = longest * kv_bytes_per_token
    left = int(options.gpu_memory_utilization * needs.device_bytes) - weights - PASS_BYTES
    fixed = None if options.kv_cache_gib is None else int(options.kv_cache_gib * GIB)
    return EngineMemory(
        weights=weights,
        kv_cache=max(left, least) if fixed is None else fixed,  # with less than one sequence it does not start
        other=PASS_BYTES,
        asleep=ASLEEP_BYTES,
        kv_bytes_per_token=kv_bytes_per_token,
        least_kv_cache=least if fixed is None else None,
    )


def start_failure(
    problem: BaseException, memory: MemoryBefore | None, share: float, weight_bytes: int, longest: int
) -> RunError:
    """Say why vLLM did not start.

    Args:
        problem: What it raised.
        memory: Of its GPU before.
        share: ``gpu_memory_utilization``.
        weight_bytes: Of the model on this GPU.
        longest: ``max_model_len``, in tokens.
    """
    text = f"vLLM did not start: {type(problem).__name__}: {problem}"
    if memory is None:
        return RunError(text)
    asked = share * memory.total
    sizes = {
        "the trainer's tensors": memory.trainer,
        "other programs and CUDA": memory.total - memory.free - memory.trainer,
        "free": memory.free,
        f"asked for by rollout.gpu_memory_utilization {share:g}": asked,
        "of that for weights": weight_bytes,
    }
    text += f"\nOf the GPU's {memory.total / GIB:.1f} GiB: "
    text += ", ".join(f"{size / GIB:.1f} {what}" for what, size in sizes.items()) + ". "
    if asked > memory.free:
        fits = int(100 * memory.free / memory.total) / 100
        text += f"Set rollout.gpu_memory_utilization to {fits:g} or less, or free memory with model.offload."
    elif weight_bytes > 0.9 * asked:
        text += "Raise rollout.gpu_memory_utilization, or share the model between GPUs with tensor_parallel_size."
    else:
        text += (
            f"The KV cache must hold one sequence of rollout.max_model_len {longest}: lower that to the longest prompt "
            "and completion of the run, raise gpu_memory_utilization, or lower max_num_batched_tokens."
        )
    return RunError(text)
