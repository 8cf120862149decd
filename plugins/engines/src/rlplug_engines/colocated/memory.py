"""GPU memory of an engine: what it will take, and who holds the GPU's memory when it does not start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlplug.errors import RunError
from rlplug.interfaces.memory import EngineMemoryRequest
from rlplug.interfaces.rollout import PolicySpec
from rlplug.types import GIB
from rlplug_engines.colocated.options import EngineOptions


@dataclass(frozen=True)
class MemoryBefore:
    """A GPU before an engine starts, in bytes."""

    total: int
    free: int
    trainer: int
    """What the trainer's tensors take."""

    @classmethod
    def of(cls, device: torch.device) -> MemoryBefore:
        """Read a GPU."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_allocated(device))


@dataclass(frozen=True)
class EngineSizes:
    """What follows from the model on one of an engine's GPUs, in bytes."""

    weights: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, options: EngineOptions, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineSizes:
        """Calculate the sizes for the engine's dtypes; ``tensor_parallel_size`` GPUs share weights and KV cache."""
        dtype, size = options.torch_dtype(policy), options.tensor_parallel_size
        cache_itemsize = 1 if options.kv_cache_dtype.startswith("fp8") else dtype.itemsize
        return cls(
            weights=needs.weight_bytes(dtype.itemsize) // size,
            kv_bytes_per_token=needs.kv_bytes_per_token * cache_itemsize // policy.dtype.itemsize // size,
        )


@dataclass(frozen=True)
class MemoryAdvice:
    """An engine's part of the message that it did not start on a GPU."""

    claims: Mapping[str, float]
    """What the engine asks for, in bytes, each in words that follow a number of GiB."""
    remedy: str
    """What to set."""


def start_failure(engine: str, problem: str, memory: MemoryBefore, advice: MemoryAdvice) -> RunError:
    """Return the error of an engine that did not start, with who holds the GPU's memory.

    Args:
        engine: Its name.
        problem: What it said.
        memory: Of its GPU before.
        advice: What it asks for, and what to set.
    """
    sizes = {
        "the trainer's tensors": memory.trainer,
        "other programs and CUDA": memory.total - memory.free - memory.trainer,
        "free": memory.free,
        **advice.claims,
    }
    listed = ", ".join(f"{size / GIB:.1f} {what}" for what, size in sizes.items())
    return RunError(
        f"{engine} did not start: {problem}\nOf the GPU's {memory.total / GIB:.1f} GiB: {listed}. {advice.remedy}"
    )
