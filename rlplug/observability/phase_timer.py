"""The phases of a step: timed, memory-metered, watched for stalls, and the places where a run can stop cleanly."""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import psutil
import torch

from rlplug.observability.trace_ranges import trace_range
from rlplug.types import GIB

PHASES: Final = ("prompts", "rollout", "rewards", "filter", "logprobs", "advantages", "update", "publish")
"""The eight phases of a step, in order. ``validate`` comes besides, when it is due."""

CPU: Final = torch.device("cpu")


class StopRequested(Exception):
    """Raised at the end of a phase after Ctrl-C, when the step can be given up without a loss."""


class PhaseTimer:
    """Measures phases: ``with clock.phase("rollout"): ...``.

    ``time/<phase>`` is in seconds, summed over the step. ``memory/<phase>`` is in GiB: the peak that PyTorch
    allocated on the GPU, without what an engine gave back in its sleep, or on a CPU run the process's resident memory
    at the phase's end.

    Args:
        stall_s: Past this, a phase's Python stacks are written to stderr, again and again, while it goes on.
        device: Where the phases run; a GPU is synchronised at the end of each, so that work is charged to its phase.
    """

    def __init__(self, stall_s: float, device: torch.device = CPU) -> None:
        self.on_enter: Callable[[str], Any] = lambda name: None
        """Told the name of each phase that begins; the progress bar listens."""
        self.asleep_bytes: Callable[[float], int] = lambda since: 0
        """Returns what the engine has given back and torch still counts, if it slept all the time since then."""
        self.device = device
        self._stall_s = stall_s
        self._seconds: dict[str, float] = {}
        self._memory: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is inside as phase ``name``."""
        self.on_enter(name)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        faulthandler.dump_traceback_later(self._stall_s, repeat=True, file=sys.__stderr__ or sys.stderr)
        began = time.perf_counter()
        try:
            with trace_range(name):
                yield
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
            self._memory[name] = max(self._memory.get(name, 0.0), self._memory_now(began))

    def _memory_now(self, began: float) -> float:
        if self.device.type == "cuda":
            return (torch.cuda.max_memory_allocated(self.device) - self.asleep_bytes(began)) / GIB
        resident: int = psutil.Process().memory_info().rss
        return resident / GIB

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, and start anew."""
        metrics = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["time/step"] = sum(self._seconds.values())
        metrics |= {f"memory/{name}": gib for name, gib in self._memory.items()}
        self._seconds, self._memory = {}, {}
        return metrics


class StopSignal:
    """Turns the first Ctrl-C into a request that the loop honours between phases; a second one acts at once."""

    def __init__(self) -> None:
        self.is_set = False
        self._former: Any = None

    def install(self) -> None:
        self.is_set = False
        self._former = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, self._handle)

    def uninstall(self) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)
            self._former = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        self.uninstall()
        print("\nCtrl-C: finishing the phase, then saving. Press it again to stop at once.", file=sys.stderr)
