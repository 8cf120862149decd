"""Who holds a GPU's memory when vLLM does not start, and what to set."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlplug.errors import RunError
from rlplug.phases import GIB


@dataclass(frozen=True)
class MemoryBefore:
    """A GPU before an engine starts, in bytes."""

    total: int
    free: int
    trainer: int
    """What the trainer's tensors take."""

    @classmethod
    def of(cls, device: torch.device) -> MemoryBefore | None:
        """Read a GPU; ``None`` for a CPU."""
        if device.type != "cuda":
            return None
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_allocated(device))


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
