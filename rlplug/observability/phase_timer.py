"""Timer of a step's phases, which also records their memory, dumps stacks at a stall, and ends a phase that hangs."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeAlias

import psutil
import torch

from rlplug.interfaces.checks.calls import running_call
from rlplug.types import GIB

PHASES: Final = ("prompts", "sync", "rollout", "rewards", "filter", "logprobs", "advantages", "update", "publish")
"""Names of the nine phases of a step, in order. ``validate`` is one more, in steps that validate."""

STOPPING_PHASES: Final = ("prompts", "rollout", "rewards", "filter", "logprobs", "advantages")
"""Names of the phases after which a request to stop can discard the step: no weight has changed, and no engine is ready
to generate, as it is after ``sync``."""

MOST_SPANS: Final = 128
"""Most phases that one step keeps with their times."""

CPU: Final = torch.device("cpu")

PREFIX: Final = "rlplug/"
"""Prefix of every range's name in a trace; the name of a phase follows, as in ``rlplug/update``."""

ENGINE: Final = "engine/"
"""Second prefix of the names of engine calls, as in ``rlplug/engine/generate``."""

MakeRange: TypeAlias = Callable[[str], AbstractContextManager[Any]]

_NOTHING: Final = nullcontext()
_make_range: MakeRange = lambda name: _NOTHING  # noqa: E731


class PhaseTimer:
    """Timer of phases: ``with timer.phase("rollout"): ...``.

    ``time/<phase>`` is in seconds, summed over the step. ``memory/<phase>`` is in GiB: on a GPU the peak that PyTorch
    allocated, without what of an engine's memory slept at that time; on the CPU the process's resident memory at the
    phase's end.

    Args:
        stall_s: Seconds after which the Python stacks of a phase are written to stderr, and again after as many more.
        device: Device of the phases; a GPU is synchronised at the end of each, so that its work counts in its phase.
        deadline_s: Seconds after which a phase ends the process; ``None`` for never.
    """

    def __init__(self, stall_s: float, device: torch.device = CPU, deadline_s: float | None = None) -> None:
        self.on_enter: Callable[[str], Any] = lambda name: None
        """Function that gets the name of each phase when it begins; the progress bar sets it."""
        self.on_exit: Callable[[str, float], Any] = lambda name, seconds: None
        """Function that gets the name and seconds of each phase when it ends; what exports spans sets it."""
        self.asleep_bytes = 0
        """Bytes that a sleeping engine released and PyTorch still counts."""
        self.device = device
        self.running = ""  # the phase that runs, or that an error ended; empty between phases
        self._stall_s = stall_s
        self._deadline = None if deadline_s is None else PhaseDeadline(deadline_s)
        self._seconds: dict[str, float] = {}
        self._memory: dict[str, float] = {}
        self._peak = 0  # bytes on a GPU, of the running phase until the engine's newest sleep or waking
        self._spans: list[tuple[str, float, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body of the ``with`` statement as phase ``name``."""
        self.on_enter(name)
        self.running = name
        self.note_asleep(self.asleep_bytes)
        self._peak = 0
        faulthandler.dump_traceback_later(self._stall_s, repeat=True, file=sys.__stderr__ or sys.stderr)
        if self._deadline is not None:
            self._deadline.begin(name)
        began = time.perf_counter()
        try:
            with trace_range(name):
                yield
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            self.running = ""
        finally:
            faulthandler.cancel_dump_traceback_later()
            if self._deadline is not None:
                self._deadline.end()
            seconds, ended = time.perf_counter() - began, time.monotonic()
            if len(self._spans) < MOST_SPANS:
                self._spans.append((name, ended - seconds, ended))
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._memory[name] = max(self._memory.get(name, 0.0), self._memory_now())
            self.on_exit(name, seconds)

    def note_asleep(self, num_bytes: int) -> None:
        """Set ``asleep_bytes``, which leaves the peak until now as it is."""
        if self.device.type == "cuda":
            self._peak = self._peak_now()
            torch.cuda.reset_peak_memory_stats(self.device)
        self.asleep_bytes = num_bytes

    def _peak_now(self) -> int:
        return max(self._peak, torch.cuda.max_memory_allocated(self.device) - self.asleep_bytes)

    def _memory_now(self) -> float:
        return (self._peak_now() if self.device.type == "cuda" else int(psutil.Process().memory_info().rss)) / GIB

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, and reset them."""
        metrics = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["time/step"] = sum(self._seconds.values())
        metrics |= {f"memory/{name}": gib for name, gib in self._memory.items()}
        self._seconds, self._memory = {}, {}
        return metrics

    def pop_spans(self) -> list[tuple[str, float, float]]:
        """Return name, beginning and end of each phase since the last call, in seconds of ``time.monotonic``."""
        spans, self._spans = self._spans, []
        return spans


class PhaseDeadline:
    """Thread that ends this process when a phase takes too long, as SIGKILL would, and says which call it is in.

    Python cannot interrupt a call that waits in native code, and an exception in the middle of a plugin may be caught
    there. Code that holds the GIL for ever keeps this thread from running too; ``stall_s`` shows its stack.

    Args:
        deadline_s: Longest time of a phase in seconds.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._ends_at = math.inf
        self._phase = ""
        self._thread_id = 0
        self._watch: threading.Thread | None = None

    def begin(self, phase: str) -> None:
        """Begin a phase in this thread."""
        self._phase, self._thread_id = phase, threading.get_ident()
        self._ends_at = time.monotonic() + self._deadline_s
        if self._watch is None:
            self._watch = threading.Thread(target=self._run, name="rlplug-phase-deadline", daemon=True)
            self._watch.start()

    def end(self) -> None:
        self._ends_at = math.inf

    def _run(self) -> None:
        while time.monotonic() < self._ends_at:
            time.sleep(min(1.0, self._deadline_s / 4))
        frame = sys._current_frames().get(self._thread_id)
        call = None if frame is None else running_call(frame)
        stderr = sys.__stderr__ or sys.stderr
        faulthandler.dump_traceback(stderr, all_threads=True)
        print(
            f"rlplug: the phase {self._phase} has not ended in {self._deadline_s:g} s "
            f"(model.limits.phase_deadline_s), and is in a call of {call or 'no plugin'}. Its stack is above. Resume "
            "from the newest checkpoint with rlplug fit --resume.",
            file=stderr,
            flush=True,
        )
        os._exit(1)


def trace_range(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that a trace shows as ``rlplug/<name>``; without a profiler it does nothing."""
    return _make_range(PREFIX + name)


@contextmanager
def ranges_made_by(make_range: MakeRange) -> Iterator[None]:
    """Make ranges with ``make_range``, such as ``torch.profiler.record_function``, in the body of the ``with``."""
    global _make_range
    former, _make_range = _make_range, make_range
    try:
        yield
    finally:
        _make_range = former
