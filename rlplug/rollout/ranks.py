"""Process group of the trainer ranks that share one engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rlplug.distributed.ranks import waiting_time
from rlplug.errors import RLPlugError
from rlplug.interfaces.rollout import Placement

Value = TypeVar("Value")


class EngineRanks:
    """Consecutive trainer ranks that share one engine. The first of them owns it and broadcasts its results.

    All ranks of the trainer make theirs at the same time, since making process groups is collective.

    Args:
        placement: This rank; the world size is a multiple of ``size``.
        size: Ranks that share an engine.
        deadline_s: Longest time of what the first makes; ``None`` where the deadline of a phase ends it.
        communicates: Whether the ranks exchange anything; without it no process group is made.
    """

    def __init__(
        self, placement: Placement, size: int, deadline_s: float | None = None, communicates: bool = True
    ) -> None:
        assert placement.world_size % size == 0
        self.size = size
        self.num_engines = placement.world_size // size
        self.engine, self.index = divmod(placement.rank, size)
        """Number of this rank's engine, and of this rank among those that share it."""
        self._first = placement.rank - self.index
        self._group: dist.ProcessGroup | None = None
        if communicates and size > 1:
            for first in range(0, placement.world_size, size):  # each rank takes part in making each group
                group = dist.new_group(range(first, first + size), backend="gloo", timeout=waiting_time(deadline_s))
                self._group = group if first == self._first else self._group

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def from_first(self, make: Callable[[], Value]) -> Value:
        """Return what the first rank makes, or raise what it raises, on all ranks."""
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
        """Return the values of all ranks, in their order, on the first one; an empty list on the others."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, dst=self._first, group=self._group)
        return values or []
