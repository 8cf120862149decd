"""The ranks that run one engine together, and must ask it the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


@dataclass(frozen=True)
class EngineSeats:
    """This rank's place among the ranks of its engine."""

    engine: int = 0
    """Number of the engine."""
    seat: int = 0
    size: int = 1
    num_engines: int = 1
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(rank: int, world_size: int, size: int, talks: bool) -> EngineSeats:
        """Return the place of ``rank``, where ``size`` consecutive ranks share an engine.

        Args:
            talks: :meth:`share` will be called; makes process groups then, which is collective.
        """
        num_engines = world_size // size
        groups = [None] * num_engines
        if talks and size > 1:
            groups = [dist.new_group([*range(n * size, n * size + size)]) for n in range(num_engines)]
        engine, seat = divmod(rank, size)
        return EngineSeats(engine, seat, size, num_engines, groups[engine])

    @property
    def is_first(self) -> bool:
        return self.seat == 0

    def share(self, value: Value) -> Value:
        """Return what the engine's first rank gives."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.engine * self.size, group=self.group)
        return box[0]
