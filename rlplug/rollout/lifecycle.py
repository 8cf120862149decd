"""The life of an engine: which call may follow which, the same for every engine, and what each does to memory.

::

    new --start--> stale --update_weights--> ready <--> generate
                     |                         |
                     +---sleep--> asleep <-----+
                                    | wake_weights
                                 loading
                                    | update_weights
                                  synced --wake_kv_cache--> ready

The KV cache wakes after the sync, so that it is never on the device beside the sync's buckets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

import torch

from rlplug.errors import RunError
from rlplug.phases import GIB

State: TypeAlias = Literal["new", "stale", "ready", "asleep", "loading", "synced", "broken", "closed"]
Call: TypeAlias = Literal["start", "update_weights", "generate", "sleep", "wake_weights", "wake_kv_cache"]

NEXT_STATES: Final[dict[Call, dict[State, State]]] = {
    "start": {"new": "stale"},
    "update_weights": {"stale": "ready", "ready": "ready", "loading": "synced"},
    "generate": {"ready": "ready"},
    "sleep": {"stale": "asleep", "ready": "asleep"},
    "wake_weights": {"asleep": "loading"},
    "wake_kv_cache": {"synced": "ready"},
}
"""For each call: the states in which it is legal, and the state that it leads to."""

MEANINGS: Final[dict[State, str]] = {
    "new": "was not started",
    "stale": "has no weights, or old ones: update_weights comes first",
    "ready": "is ready to generate",
    "asleep": "sleeps: wake its weights first",
    "loading": "waits for update_weights: weights that slept are stale",
    "synced": "has new weights, and a KV cache that sleeps",
    "broken": "is unusable since a call failed: start another",
    "closed": "is closed",
}

MIN_FREED_SHARE: Final = 0.5
"""Of the device memory that an engine took since it slept last, or at its start, what sleep must give back. CUDA
graphs, communicators and libraries stay."""


class Lifecycle:
    """Follows one engine through its calls; a call that raises leaves it broken.

    Args:
        name: The engine's, for messages.
        device: Where it runs; memory is checked on a GPU only.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._taken_bytes = 0
        self.state: State = "new"
        self.seconds: dict[str, float] = {}
        """How long the newest call of each kind took."""
        self.freed_bytes = 0
        """What the newest sleep gave back."""

    @contextmanager
    def calls(self, call: Call) -> Iterator[None]:
        """Surround a call of the engine.

        Raises:
            RunError: The call is not legal now, or sleep gave too little memory back.
        """
        if self.state not in NEXT_STATES[call]:
            raise RunError(f"{self._name} cannot {call.replace('_', ' ', 1)} now: it {MEANINGS[self.state]}.")
        following, self.state = NEXT_STATES[call][self.state], "broken"
        before, began = self._bytes_in_use(), time.perf_counter()
        yield
        self.seconds[call] = time.perf_counter() - began
        self._check_memory(call, self._bytes_in_use() - before)
        self.state = following

    def closes(self) -> None:
        """Note that the engine was closed, which is legal at any time."""
        self.state = "closed"

    def _bytes_in_use(self) -> int:
        """Return the memory that is taken on the device, by any process."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def _check_memory(self, call: Call, change: int) -> None:
        if call != "sleep":
            self._taken_bytes += change if call in ("start", "wake_weights", "wake_kv_cache") else 0
            return
        self.freed_bytes, taken, self._taken_bytes = -change, self._taken_bytes, 0
        if self.freed_bytes < MIN_FREED_SHARE * taken:
            raise RunError(
                f"{self._name} took {taken / GIB:.1f} GiB of the device, and gave {self.freed_bytes / GIB:.1f} GiB back "
                "when it went to sleep: the update would have too little. Look for requests that still run, or set "
                "model.sleep_between_rollouts to false and lower the engine's share of the memory."
            )
