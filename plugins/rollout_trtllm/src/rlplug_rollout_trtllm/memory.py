"""What TensorRT-LLM takes of a GPU; and who holds its memory when it does not start, and what to set."""

from __future__ import annotations

from typing import Final

import torch

from rlplug.errors import RunError
from rlplug.interfaces import EngineMemory, EngineMemoryRequest, PolicySpec
from rlplug.rollout.engines import MemoryBefore
from rlplug.types import GIB
from rlplug_rollout_trtllm.options import TRTLLMOptions

PASS_BYTES: Final = int(4.0 * GIB)
"""Activations of its passes, CUDA graphs, communicators, and its worker's CUDA context: an estimate, not measured."""
ASLEEP_BYTES: Final = int(2.0 * GIB)
"""What stays when it sleeps, CUDA graphs among it: an estimate, not measured."""


def planned_memory(options: TRTLLMOptions, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
    """Return what an engine takes of each of its GPUs, at most.

    Weights and bytes per token follow from the model; passes and what stays asleep are estimates.
    ``free_gpu_memory_fraction`` is a share of what is free when weights and passes are there; here, as if all else of
    the GPU were. A share of the whole GPU, as the plan recommends for other engines, does not follow from it.
    """
    size = options.tensor_parallel_size
    dtype = policy.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    cache_itemsize = 1 if options.kv_cache_dtype.startswith("fp8") else dtype.itemsize
    weights = needs.weight_bytes(dtype.itemsize) // size
    return EngineMemory(
        weights=weights,
        kv_cache=int(options.free_gpu_memory_fraction * max(0, needs.device_bytes - weights - PASS_BYTES)),
        other=PASS_BYTES,
        asleep=ASLEEP_BYTES,
        kv_bytes_per_token=needs.kv_bytes_per_token * cache_itemsize // policy.dtype.itemsize // size,
        share_key="free_gpu_memory_fraction",
        share_has_passes=False,
    )


def start_failure(problem: str, memory: MemoryBefore, share: float, weight_bytes: int) -> RunError:
    """Say why TensorRT-LLM did not start.

    Args:
        problem: What it said.
        memory: Of its GPU before.
        share: ``free_gpu_memory_fraction``.
        weight_bytes: Of the model on this GPU.
    """
    sizes = {
        "the trainer's tensors": memory.trainer,
        "other programs and CUDA": memory.total - memory.free - memory.trainer,
        "free": memory.free,
        "of that for weights": weight_bytes,
        f"at most, of what they leave, for rollout.free_gpu_memory_fraction {share:g}": share
        * max(0, memory.free - weight_bytes),
    }
    text = f"TensorRT-LLM did not start: {problem}\nOf the GPU's {memory.total / GIB:.1f} GiB: "
    text += ", ".join(f"{size / GIB:.1f} {what}" for what, size in sizes.items()) + ". "
    if weight_bytes + PASS_BYTES > memory.free:
        text += "Free memory with model.offload, or share the model between GPUs with rollout.tensor_parallel_size."
    else:
        text += (
            "If it ran out of memory: lower rollout.free_gpu_memory_fraction, max_batch_size or max_num_tokens. If it "
            "does not know an argument: python -m rlplug_rollout_trtllm.smoke --surface-only says what differs."
        )
    return RunError(text)
