"""States of an engine: the calls that each state allows, and a check of the memory that calls take and free.

::

    new --start--> stale --update_weights--> ready <--> generate
                     |                         |
                     +---sleep--> asleep <-----+
                                    | wake_weights
                                 loading
                                    | update_weights
                                  synced --wake_kv_cache--> ready

The KV cache wakes after the sync, so that it is never on the device beside the sync's buckets. ``close`` is legal in
every state, and ``start`` again after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

import torch

from rlplug.errors import RunError
from rlplug.interfaces.rollout import EngineFault
from rlplug.observability.phase_timer import ENGINE, trace_range
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
"""States in which each call is legal, and the state that follows."""

STATES_AFTER_ERROR: Final[dict[Call, dict[State, State]]] = {
    "update_weights": {"stale": "stale", "ready": "stale", "loading": "loading"},
    "generate": {"ready": "ready"},
}
"""State after a call that raised an error other than ``EngineFault``; where none is given, and after every
``EngineFault``, the engine is broken."""

MEANINGS: Final[dict[State, str]] = {
    "new": "it was not started: call start first",
    "stale": "it has no weights, or only some of the new ones: call update_weights first",
    "ready": "it is ready to generate",
    "asleep": "it sleeps: wake its weights first",
    "loading": "its weights were discarded by sleep(): call update_weights first",
    "synced": "it has new weights, and its KV cache still sleeps: wake the KV cache first",
    "broken": "a call of it failed: close it and start it again",
    "closed": "it is closed: start it again first",
}
"""Why a call is not legal in each state, and what to do."""

MEASURED: Final = frozenset({"start", "wake_weights", "wake_kv_cache", "sleep"})
"""Calls around which device memory is measured, at the cost of a synchronisation."""

FREED: Final = (0.9, 256 << 20)
"""Least share of the memory that the engine took when it woke, which sleep must free, and bytes that may lack."""

FREED_AFTER_START: Final = (0.5, 1 << 30)
"""The same at the engine's first sleep: CUDA's context and graphs, communicators and libraries' workspaces stay."""


class EngineStateMachine:
    """State of one engine, which every call of the engine checks and advances.

    Args:
        name: Name of the engine, for messages.
        device: Device of the engine; memory is checked on a GPU only.
        note_asleep: Gets the bytes that the engine released and this process's torch still counts, when they change.
    """

    def __init__(self, name: str, device: torch.device, note_asleep: Callable[[int], None] = lambda size: None) -> None:
        self._name = name
        self._device = device
        self._note_asleep = note_asleep
        self._taken_bytes = self._counted_bytes = self._asleep_bytes = 0
        self._freed = FREED
        self.state: State = "new"
        self.seconds: dict[Call, float] = {}
        """Seconds that the newest call of each kind took."""
        self.freed_bytes = 0
        """Device bytes that the newest sleep freed."""

    @contextmanager
    def calls(self, call: Call) -> Iterator[None]:
        """Check that ``call`` is legal, time it, and advance the state; the context makes the call.

        Raises:
            RunError: The call is not legal in this state, or sleep freed too little memory.
        """
        state = self.state
        if state not in NEXT_STATES[call]:
            raise RunError(f"{self._name} cannot {call.replace('_', ' ', 1)} now: {MEANINGS[state]}.")
        self.state = "broken"
        before, counted, began = self._bytes_in_use(call), self._allocated_bytes(), time.perf_counter()
        try:
            with trace_range(ENGINE + call):
                yield
        except EngineFault:
            raise
        except Exception:
            self.state = STATES_AFTER_ERROR.get(call, {}).get(state, "broken")
            raise
        self.seconds[call] = time.perf_counter() - began
        if call == "start":  # of an engine in a process of its own, nothing
            self._counted_bytes = self._allocated_bytes() - counted
        self._check_memory(call, self._bytes_in_use(call) - before)
        self.state = NEXT_STATES[call][state]

    def _bytes_in_use(self, call: Call) -> int:
        """Return the device bytes in use, or 0 for calls and devices that are not measured."""
        return device_bytes_in_use(self._device) if self._device.type == "cuda" and call in MEASURED else 0

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _check_memory(self, call: Call, change: int) -> None:
        if call in MEASURED or call == "close":
            is_asleep = call in ("sleep", "wake_weights")
            self._asleep_bytes = max(0, min(self._counted_bytes, self._asleep_bytes - change)) if is_asleep else 0
            self._note_asleep(self._asleep_bytes)
        if call == "start":
            self._taken_bytes, self._freed = change, FREED_AFTER_START
        elif call == "sleep":
            self.freed_bytes, (share, slack) = -change, self._freed
            taken, self._taken_bytes, self._freed = self._taken_bytes, 0, FREED
            if self.freed_bytes < share * taken - slack:
                raise RunError(
                    f"{self._name} took {taken / GIB:.1f} GiB of the device, and gave {self.freed_bytes / GIB:.1f} GiB "
                    "back in its sleep, which leaves the update too little. Check for requests that are still running, "
                    "or set model.memory.sleep_between_rollouts to false and lower the engine's share of the memory."
                )
        else:
            self._taken_bytes += change


def device_bytes_in_use(device: torch.device) -> int:
    """Return the bytes in use on a GPU by all processes, after torch's cache of free blocks is emptied."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
