"""The start of a run, timed from the command to the end of its first step, and how long torch.compile took in it."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import psutil

from rlplug.observability.phase_progress import PHASE_PROGRESS

FIRST_STEP: Final = "first step"


class StartTimer:
    """Timer of the phases of a start, each of which begins where the one before ends.

    Args:
        name: Of the phase that runs already.
    """

    process_began: ClassVar[float | None] = None
    """When the process of a command began, as a time of ``time.monotonic``; ``None`` where Python code made the run."""

    def __init__(self, name: str = "imports and configuration") -> None:
        self.seconds: dict[str, float] = {}
        self.is_running = True
        self._name = name
        self._began = time.monotonic() if self.process_began is None else self.process_began

    def begin(self, name: str) -> None:
        """Begin a phase, which the progress display shows."""
        self._end_phase()
        self._name = name
        PHASE_PROGRESS.begin(name)

    def end(self) -> None:
        """End the last phase."""
        self._end_phase()
        self.is_running = False

    def _end_phase(self) -> None:
        now = time.monotonic()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._began
        self._began = now


def note_process_start() -> None:
    """Have the process's start count as that of the run's command."""
    StartTimer.process_began = time.monotonic() - _process_seconds()


def _process_seconds() -> float:
    """Return how long this process runs, in seconds.

    Where the clock since boot can be read, in it: the operating system rounds the time of boot to whole seconds.
    """
    created = psutil.Process().create_time()
    if hasattr(time, "CLOCK_BOOTTIME"):
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - (created - psutil.boot_time()))
    return max(0.0, time.time() - created)


@dataclass(frozen=True)
class Compilation:
    """What torch.compile did in this process so far.

    Attributes:
        seconds: In which it ran.
        num_cached: Graphs that came from the cache.
        num_compiled: Graphs that did not.
    """

    seconds: float
    num_cached: int
    num_compiled: int

    @classmethod
    def so_far(cls) -> Compilation:
        """Return what was done, by torch's own counters (``torch._dynamo.utils``)."""
        from torch._dynamo.utils import counters

        found = counters["inductor"]
        return cls(PHASE_PROGRESS.compiling.seconds, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"])


def watch_compilation() -> None:
    """Time torch.compile from now on in this process, for :class:`Compilation` and the progress display."""
    from torch._dynamo.callback import callback_handler

    compiling = PHASE_PROGRESS.compiling
    if compiling.begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(compiling.begin)
        callback_handler.register_end_callback(compiling.end)


def start_line(seconds: Mapping[str, float], step: Mapping[str, float], compilation: Compilation) -> str:
    """Return a start as one line.

    Args:
        seconds: Of the phases of the start, by name.
        step: Metrics of the first step, of which ``time/...`` are named that took a tenth of it.
        compilation: What was compiled meanwhile.
    """
    phases = [f"{name} {each:.0f}" for name, each in seconds.items() if name != FIRST_STEP and each >= 0.5]
    parts = {name.removeprefix("time/"): value for name, value in step.items() if name.startswith("time/")}
    total = parts.pop("step", 0.0)
    named = [f"{name} {value:.0f}" for name, value in parts.items() if value >= max(0.5, total / 10)]
    first = f"{FIRST_STEP} {seconds[FIRST_STEP]:.0f}" + (f" ({', '.join(named)})" if named else "")
    line = f"started in {sum(seconds.values()):.0f} s: {', '.join([*phases, first])}"
    cached, compiled = compilation.num_cached, compilation.num_compiled
    if compilation.seconds >= 0.5 or cached + compiled:
        line += f"; torch.compile {compilation.seconds:.0f} of it"
    if cached + compiled:  # torch's compiler counts them, other backends do not
        line += f": {cached} graphs from the cache, {compiled} compiled"
    return line


def quieten_libraries() -> None:
    """Silence messages of libraries that come with every run and need no action."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    shared = logging.getLogger("lightning.pytorch.utilities.rank_zero")  # rlplug and plugins call rank_zero_info too
    shared.setLevel(logging.INFO)
    shared.addFilter(lambda record: record.levelno >= logging.WARNING or "lightning" not in Path(record.pathname).parts)
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")  # Lightning 2.6 with torch 2.13
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
