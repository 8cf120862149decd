"""Sizes of the device mesh."""

from __future__ import annotations

from dataclasses import dataclass

from rlplug.errors import ConfigError


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis of the mesh, outermost first."""

    replicate: int
    shard: int
    sequence: int
    tensor: int

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.sequence * self.tensor

    @property
    def data_size(self) -> int:
        """Number of parts into which the rows of a batch are divided."""
        return self.replicate * self.shard

    @classmethod
    def from_world(cls, world_size: int, replicate: int, sequence: int, tensor: int) -> MeshSizes:
        """Return the sizes for ``world_size`` ranks: the shard axis takes the factor that the other axes leave.

        Raises:
            ConfigError: A size is below 1, or does not divide the ranks that are left.
        """
        left = world_size
        for name, size in (("tensor", tensor), ("sequence", sequence), ("replicate", replicate)):
            if size < 1 or left % size:
                others = "" if left == world_size else f" ({world_size} ranks in all, the rest by the other axes)"
                raise ConfigError(
                    f"trainer.strategy.init_args.{name} is {size}, which does not divide {left} ranks{others}: give a "
                    "divisor, or change trainer.devices."
                )
            left //= size
        return cls(replicate, left, sequence, tensor)
