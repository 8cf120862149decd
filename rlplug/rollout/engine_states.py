"""The life of an engine: which call may follow which, the same for every engine, and what each does to memory.

::

    new --start--> stale --update_weights--> ready <--> generate
                     |                         |
                     +---sleep--> asleep <-----+
                                    | wake_weights
                                 loading
                                    | update_weights
                                  synced --wake_kv_cache--> ready

The KV cache wakes after the sync, so that it is never on the device beside the sync's buckets. ``close`` may come at
any time, and ``start`` again after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

import torch

from rlplug.errors import RunError
from rlplug.interfaces.rollout import EngineFault
from rlplug.observability.trace_ranges import ENGINE, trace_range
from rlplug.types import GIB

State: TypeAlias = Literal["new", "stale", "ready", "asleep", "loading", "synced", "broken", "closed"]
Call: TypeAlias = Literal["start", "update_weights", "generate", "sleep", "wake_weights", "wake_kv_cache", "close"]

NEXT_STATES: Final[dict[Call, dict[State, State]]] = {
    "start": {"new": "stale", "closed": "stale"},
    "update_weights": {"stale": "ready", "ready": "ready", "loading": "synced"},
    "generate": {"ready": "ready"},
    "sleep": {"stale": "asleep", "ready": "asleep"},
    "wake_weights": {"asleep": "loading"},
    "wake_kv_cache": {"synced": "ready"},
    "close": dict.fromkeys(("new", "stale", "ready", "asleep", "loading", "synced", "broken", "closed"), "closed"),
}
"""For each call: the states in which it is legal, and the state that it leads to."""

STATES_AFTER_ERROR: Final[dict[Call, dict[State, State]]] = {
    "update_weights": {"stale": "stale", "ready": "stale", "loading": "loading"},
    "generate": {"ready": "ready"},
}
"""After a call that refused what it was given; any other error, and every ``EngineFault``, leaves a broken engine."""

MEANINGS: Final[dict[State, str]] = {
    "new": "was not started",
    "stale": "has no weights, or only a part of new ones: update_weights comes first",
    "ready": "is ready to generate",
    "asleep": "sleeps: wake its weights first",
    "loading": "waits for update_weights: weights that slept are lost",
    "synced": "has new weights, and a KV cache that sleeps",
    "broken": "is unusable since a call failed: close it and start it again",
    "closed": "is closed",
}

MEASURED: Final = frozenset({"start", "wake_weights", "wake_kv_cache", "sleep"})
"""Calls around which device memory is read; it costs a synchronisation."""

FREED_SHARE: Final = 0.9
"""What sleep must give back of what the engine took when it woke."""

SLACK_BYTES: Final = 256 << 20
"""Other programs use the device too."""

FREED_SHARE_AFTER_START: Final = 0.5
"""The same for its first sleep: CUDA graphs, communicators and libraries stay."""


class EngineStateMachine:
    """Follows one engine through its calls.

    Args:
        name: The engine's, for messages.
        device: Where it runs; memory is checked on a GPU only.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._taken_bytes = 0
        self._freed_share = FREED_SHARE
        self.state: State = "new"
        self.seconds: dict[Call, float] = {}
        """How long the newest call of each kind took."""
        self.freed_bytes = 0
        """What the newest sleep gave back."""
        self.slept_at = 0.0
        """When it ended, on the clock of ``time.perf_counter``."""

    @contextmanager
    def calls(self, call: Call) -> Iterator[None]:
        """Surround a call of the engine.

        Raises:
            RunError: The call is not legal now, or sleep gave too little memory back.
        """
        state = self.state
        if state not in NEXT_STATES[call]:
            raise RunError(f"{self._name} cannot {call.replace('_', ' ', 1)} now: it {MEANINGS[state]}.")
        self.state = "broken"
        before, began = self._bytes_in_use(call), time.perf_counter()
        try:
            with trace_range(ENGINE + call):
                yield
        except EngineFault:
            raise
        except Exception:
            self.state = STATES_AFTER_ERROR.get(call, {}).get(state, "broken")
            raise
        self.seconds[call] = time.perf_counter() - began
        self._check_memory(call, self._bytes_in_use(call) - before)
        self.state = NEXT_STATES[call][state]

    def _bytes_in_use(self, call: Call) -> int:
        """Return the memory that is taken, or 0 where it is not looked at."""
        return device_bytes_in_use(self._device) if self._device.type == "cuda" and call in MEASURED else 0

    def _check_memory(self, call: Call, change: int) -> None:
        if call == "start":
            self._taken_bytes, self._freed_share = change, FREED_SHARE_AFTER_START
        elif call == "sleep":
            self.slept_at = time.perf_counter()
            self.freed_bytes, needed = -change, self._freed_share * self._taken_bytes - SLACK_BYTES
            taken, self._taken_bytes, self._freed_share = self._taken_bytes, 0, FREED_SHARE
            if self.freed_bytes < needed:
                raise RunError(
                    f"{self._name} took {taken / GIB:.1f} GiB of the device, and gave {self.freed_bytes / GIB:.1f} GiB "
                    "back when it went to sleep: the update would have too little. Look for requests that still run, "
                    "or set model.memory.sleep_between_rollouts to false and lower the engine's share of the memory."
                )
        else:
            self._taken_bytes += change


def device_bytes_in_use(device: torch.device) -> int:
    """Return the memory that is taken on a GPU, by any process, without what torch keeps for later."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
