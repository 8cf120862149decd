"""The trainer's ranks that share an engine: the first of them has it, and the others hear from that one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from rlplug.errors import ConfigError, RLPlugError
from rlplug.interfaces.rollout import Placement

Value = TypeVar("Value")


class EngineRanks:
    """Consecutive ranks, as many as an engine has GPUs. All ranks of the trainer make theirs at the same time.

    Args:
        placement: This rank; the world size is a multiple of ``size``.
        size: Ranks that share an engine.
        deadline_s: How long others wait for the first.
    """

    def __init__(self, placement: Placement, size: int, deadline_s: float) -> None:
        assert placement.world_size % size == 0
        self._first, self._seat = placement.rank - placement.rank % size, placement.rank % size
        self._size = size
        self._group: dist.ProcessGroup | None = None
        if size > 1:
            for first in range(0, placement.world_size, size):  # each rank takes part in making each group
                group = dist.new_group(
                    range(first, first + size), backend="gloo", timeout=timedelta(seconds=deadline_s)
                )
                self._group = group if first == self._first else self._group

    @property
    def is_first(self) -> bool:
        return self._seat == 0

    def check_devices(self, engine: str, index: int) -> None:
        """Stop the run unless the ranks' GPUs are neighbours, in the order of the ranks.

        Args:
            engine: Its name, for the message.
            index: Of this rank's GPU.

        Raises:
            ConfigError: They are not.
        """
        places: list[tuple[str, int]] = [(socket.gethostname(), index)]
        if self._group is not None:
            places = [places[0]] * self._size
            dist.all_gather_object(places, (socket.gethostname(), index), group=self._group)
        host, first = places[0]
        if places != [(host, first + seat) for seat in range(self._size)]:
            named = ", ".join(f"{name} GPU {number}" for name, number in places)
            raise ConfigError(
                f"rollout.tensor_parallel_size is {self._size}, and ranks {self._first} to "
                f"{self._first + self._size - 1} run on {named}: {engine} needs neighbouring GPUs of one host, in the "
                "order of the ranks. Set a smaller size, or one that divides the GPUs of each host."
            )

    def from_first(self, make: Callable[[], Value]) -> Value:
        """Return what the first seat makes, or raise what it raises, on all seats."""
        if self._group is None:
            return make()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = make()
            except RLPlugError as problem:
                outcome[1] = problem
        dist.broadcast_object_list(outcome, src=self._first, group=self._group)
        if outcome[1] is not None:
            raise outcome[1]
        value: Value = outcome[0]
        return value

    def gathered(self, value: Value) -> list[Value]:
        """Return the values of all seats, in their order, on the first one; an empty list on the others."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self._size if self.is_first else None
        dist.gather_object(value, values, dst=self._first, group=self._group)
        return values or []
