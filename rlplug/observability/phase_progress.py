"""Progress within a phase: the code that runs counts, and the progress display reads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class PhaseState:
    """What a phase has done so far, on this rank."""

    name: str
    seconds: float
    """Since the phase began."""
    num_done: int
    total: int | None
    """How many there will be; ``None`` when the phase does not count."""
    unit: str
    num_tokens: int
    """Tokens generated so far."""
    compiling_s: float | None = None
    """Since torch.compile began, while it runs."""


class CompileClock:
    """Seconds in which torch.compile runs; it calls :meth:`begin` and :meth:`end`, with arguments that do not count."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._ended_s = 0.0

    def begin(self, *_: object) -> None:
        self._began = time.monotonic()

    def end(self, *_: object) -> None:
        self._ended_s, self._began = self.seconds, None

    @property
    def running_s(self) -> float | None:
        """Seconds since it began; ``None`` while it does not run."""
        began = self._began
        return None if began is None else time.monotonic() - began

    @property
    def seconds(self) -> float:
        """Sum of all that has run."""
        return self._ended_s + (self.running_s or 0.0)


class PhaseProgress:
    """Counter of the phase that runs.

    One thread counts; another may read. An engine counts inside a call of ``generate``; what the call returned is
    counted for good by whoever called.
    """

    def __init__(self) -> None:
        self.compiling = CompileClock()
        self.begin("starting")

    def begin(self, name: str) -> None:
        """Start a phase, which counts nothing until :meth:`expect` is called."""
        self._name, self._began = name, time.monotonic()
        self.expect(None)

    def expect(self, total: int | None, unit: str = "", counts_calls: bool = True) -> None:
        """Say how many things the phase will do.

        Args:
            total: Their number.
            unit: What they are, in the plural.
            counts_calls: Whether a completion inside an engine's call is one of them; a turn of a conversation is not.
        """
        self._total, self._unit, self._counts_calls = total, unit, counts_calls
        self._num_done = self._num_tokens = 0
        self.in_call(0, 0)

    def advance(self, num_done: int = 0, num_tokens: int = 0) -> None:
        """Count things that are done, and tokens that were generated."""
        self._num_done += num_done
        self._num_tokens += num_tokens

    def in_call(self, num_done: int, num_tokens: int) -> None:
        """Set what an engine's running call has generated; 0 once it has returned."""
        self._call_done, self._call_tokens = num_done, num_tokens

    @property
    def state(self) -> PhaseState:
        num_done = self._num_done + (self._call_done if self._counts_calls else 0)
        return PhaseState(
            self._name,
            time.monotonic() - self._began,
            num_done if self._total is None else min(num_done, self._total),
            self._total,
            self._unit,
            self._num_tokens + self._call_tokens,
            self.compiling.running_s,
        )


PHASE_PROGRESS: Final = PhaseProgress()
"""The process's counter: an engine, which may be a plugin's, counts without being handed one."""
