"""Memory of a run on GPUs: what a planner is asked and decides, and how an error is known by which memory ran out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import torch

from rlplug.errors import ConfigError, RLPlugError, causes_of, describe
from rlplug.interfaces.optimization import Effect, Optimization
from rlplug.types import GIB

CUDA_BYTES: Final = int(0.6 * GIB)
"""Bytes of CUDA's context and libraries, of one process."""
RESERVE_SHARE: Final = 0.1
"""Share of the device that is reserved for the allocator's fragmentation."""


@dataclass(frozen=True)
class GPU:
    """One GPU of a run; the fullest of several.

    Attributes:
        total: Its memory, in bytes.
        free: Bytes that are free before the run takes any but for CUDA's context.
        is_here: False for one that is planned for elsewhere.
    """

    total: int
    free: int
    is_here: bool = True

    @property
    def capacity(self) -> int:
        """Bytes that a plan may use: what is free, without a reserve for fragmentation."""
        return min(self.total, self.free + CUDA_BYTES * self.is_here) - int(RESERVE_SHARE * self.total)


def total_and_free(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a GPU, and those that no process has taken."""
    free, total = torch.cuda.mem_get_info(device)
    return total, free


@dataclass(frozen=True)
class MemoryDecisions:
    """What a memory plan decided.

    Attributes:
        sleeps: Whether the engine sleeps between rollouts.
        kept: Optimizations of the run, without those that the plan could leave out.
        left_out: Why each of the others was left out.
        shortfall: Error of a run that does not fit, with the change that makes it fit; ``None`` where it fits.
        title: Title of the plan as a table.
        rows: Item, and GiB or a note for each of ``PLAN_PHASES``; the last two rows are totals.
        notes: What the plan decided and recommends, a line each.
    """

    sleeps: bool
    kept: tuple[Optimization, ...]
    left_out: tuple[Effect, ...]
    shortfall: ConfigError | None
    title: str
    rows: list[tuple[str, ...]]
    notes: list[str]


_RAN_OUT: Final = re.compile(
    r"CUDA out of memory|CUDA (driver )?error: out of memory|Cuda failure .{0,4}out of memory|cudaErrorMemoryAllocation"
    r"|Triton Error \[CUDA\]: out of memory|CU[A-Z]+_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (not enough|can't allocate)"
)
"""In messages of torch's allocators, CUDA's runtime, Triton, NCCL, and cuBLAS, cuDNN and their like."""


def out_of_memory(error: BaseException) -> BaseException | None:
    """Return the error of a library that made ``error``, if memory of this process's device, or its own, ran out."""
    for cause in causes_of(error):
        if isinstance(cause, torch.OutOfMemoryError):
            return cause
        # the text of another process's error is about another process's memory
        is_foreign = isinstance(cause, RuntimeError) and not isinstance(cause, RLPlugError)
        if is_foreign and _RAN_OUT.search(describe(cause)):
            return cause
    return None
