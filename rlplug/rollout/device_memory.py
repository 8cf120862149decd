"""Who holds a GPU's memory before an engine starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
