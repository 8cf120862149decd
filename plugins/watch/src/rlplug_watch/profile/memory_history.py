"""Allocations of profiled steps on a GPU: the allocator's snapshot for torch's viewer, and a timeline by phase."""

from __future__ import annotations

import bisect
import csv
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from rlplug.distributed.durable_files import replaced
from rlplug.observability.phase_timer import PREFIX
from rlplug.types import GIB
from rlplug_watch.profile.summary import BETWEEN, Span

MOST_EVENTS: Final = 200_000
"""Newest allocations and releases that are kept; each takes a few KB."""
MOST_TIMES: Final = 2000
"""Times of a timeline: of what lies between two of them, the most that was allocated is kept."""
SIGNS: Final = {"alloc": 1, "free_requested": -1}
"""Actions that change what torch counts as allocated, and how."""
VIEWER: Final = "https://pytorch.org/memory_viz"


class Level(NamedTuple):
    """Most that was allocated in one part of a phase."""

    seconds: float
    """Since the first recorded event."""
    phase: str
    num_bytes: int


class MemoryHistory:
    """Recorder of each allocation on a GPU, with the Python stack that asked for it, until :meth:`stop`.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases: list[Span] = []
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=MOST_EVENTS, clear_history=True)

    @contextmanager
    def phase_range(self, name: str) -> Iterator[None]:
        """Note when the body runs, if it is a phase; engine calls lie within phases."""
        began = time.time()
        try:
            yield
        finally:
            if "/" not in (phase := name.removeprefix(PREFIX)):
                self._phases.append(Span(began, time.time(), phase))

    def write(self, path: Path) -> list[Level]:
        """Write snapshot and timeline, and return the latter.

        Args:
            path: The snapshot's; the timeline goes beside it, with the suffix ``.csv``.
        """
        snapshot: Any = torch.cuda.memory._snapshot()
        index = self._device.index or 0
        levels = timeline(snapshot["device_traces"][index], torch.cuda.memory_allocated(self._device), self._phases)
        path.parent.mkdir(exist_ok=True)
        with replaced(path) as partial, partial.open("wb") as file:
            pickle.dump(snapshot, file)
        with replaced(path.with_suffix(".csv")) as partial, partial.open("w", newline="") as text:
            rows = ((f"{each.seconds:.6f}", each.phase, f"{each.num_bytes / GIB:.4f}") for each in levels)
            csv.writer(text).writerows([("seconds", "phase", "allocated_gib"), *rows])
        return levels

    def stop(self) -> None:
        """Record no more, and drop what was recorded."""
        torch.cuda.memory._record_memory_history(enabled=None)


def timeline(events: Iterable[Mapping[str, Any]], allocated: int, phases: Sequence[Span]) -> list[Level]:
    """Return what was allocated when, at most ``MOST_TIMES`` times and once more for each phase.

    Args:
        events: Those of the allocator's history, in order; older ones may be missing.
        allocated: Bytes that are allocated after them.
        phases: Phases by their times of ``time.time``, in order.
    """
    found = [(event["time_us"] * 1e-6, SIGNS[event["action"]] * event["size"]) for event in events if _counts(event)]
    if not found:
        return []
    first, width = found[0][0], (found[-1][0] - found[0][0]) / MOST_TIMES or 1.0
    level, starts = allocated - sum(change for _, change in found), [phase.start for phase in phases]
    highest: dict[tuple[int, str], int] = {}
    for moment, change in found:
        level += change
        at = bisect.bisect_right(starts, moment) - 1
        phase = phases[at].phase if at >= 0 and moment <= phases[at].end else BETWEEN
        key = int((moment - first) / width), phase
        highest[key] = max(highest.get(key, 0), level)
    return [Level(number * width, phase, num_bytes) for (number, phase), num_bytes in highest.items()]


def peaks(levels: Iterable[Level]) -> str:
    """Return the most that each phase had allocated, the highest first."""
    found: dict[str, int] = {}
    for each in levels:
        found[each.phase] = max(found.get(each.phase, 0), each.num_bytes)
    ordered = sorted(found.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{phase} {num_bytes / GIB:.1f}" for phase, num_bytes in ordered)


def _counts(event: Mapping[str, Any]) -> bool:
    return event["action"] in SIGNS
