"""What the first rank's trainer and engine did when, which an asynchronous run writes into ``groups.jsonl``."""

from __future__ import annotations

import time
from typing import Any, Final, Literal, TypeAlias

EngineState: TypeAlias = Literal["generating", "pausing", "paused", "weight sync", "idle"]
MOST_STATES: Final = 128
"""Most states of the engine that one step keeps."""
MOST_COUNTS: Final = 64
"""Most counts of requests that one step keeps; of more, every other one is left out."""


class EngineTimeline:
    """States of an engine that generates beside the trainer, and its requests in flight.

    All times are those of ``time.monotonic``. The main thread changes states and takes them; the thread that generates
    counts.
    """

    def __init__(self) -> None:
        self._states: list[tuple[float, EngineState]] = []
        self._counts: list[tuple[float, int, int]] = []

    def change(self, state: EngineState, at: float | None = None) -> None:
        """Note that the engine has another state, now or ``at`` a time that has passed."""
        if len(self._states) < MOST_STATES:
            self._states.append((time.monotonic() if at is None else at, state))

    def count(self, num_training: int, num_held_out: int) -> None:
        """Note how many requests are in flight: of training groups, and of a validation."""
        newest = self._counts[-1][1:] if self._counts else None
        if newest == (num_training, num_held_out):
            return
        if len(self._counts) >= MOST_COUNTS:
            self._counts = self._counts[::2]
        self._counts.append((time.monotonic(), num_training, num_held_out))

    def pop(self) -> dict[str, list[Any]]:
        """Return states and counts since the last call; the newest count stays, for those that are equal to it."""
        states, self._states = self._states, []
        counts, self._counts = self._counts, self._counts[-1:]
        return {"engine": [[at, state] for at, state in states], "requests": [list(count) for count in counts]}


def timeline_of(phases: list[tuple[str, float, float]], engine: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return what a step's line of ``groups.jsonl`` has of it, in seconds since 1970.

    Args:
        phases: Name, beginning and end of each phase.
        engine: What :meth:`EngineTimeline.pop` returned.

    Returns:
        ``phases`` as ``[name, begin, end]``, ``engine`` as ``[begin, state]``, each state until the next one, and
        ``requests`` as ``[time, of training groups, of a validation]``.
    """
    offset = time.time() - time.monotonic()

    def at(seconds: float) -> float:
        return round(seconds + offset, 3)

    return {
        "phases": [[name, at(began), at(ended)] for name, began, ended in phases],
        "engine": [[at(began), state] for began, state in engine["engine"]],
        "requests": [[at(seconds), *numbers] for seconds, *numbers in engine["requests"]],
    }
