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


class PhaseProgress:
    """Counter of the phase that runs.

    One thread counts; another may read. An engine counts inside a call of ``generate``; what the call returned is
    counted for good by whoever called.
    """

    def __init__(self) -> None:
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
        )


PHASE_PROGRESS: Final = PhaseProgress()
"""The process's counter: an engine, which may be a plugin's, counts without being handed one."""
