"""Time of a weight sync between hosts, from sizes and the network's speed alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlplug.interfaces.weight_sync import TensorInfo
from rlplug.types import GIB


@dataclass(frozen=True)
class SyncTime:
    """Estimate of one weight sync; it leaves out copies inside a host and the engines' loading.

    The trainer's first rank gathers a bucket, then broadcasts it, one after the other: the times add up. On a trainer
    of N hosts that shard the weights, 1 - 1/N of the bytes come to its first host. A broadcast over a ring enters and
    leaves each host once, so the number of engine hosts does not matter.
    """

    num_bytes: int
    """Bytes of the weights, as they are sent."""
    gather_s: float
    broadcast_s: float

    @classmethod
    def of(cls, weights: Iterable[TensorInfo], num_shards: int, gbit_s: float) -> SyncTime:
        """Return the estimate.

        Args:
            weights: What is sent.
            num_shards: Hosts among which the trainer's weights are divided.
            gbit_s: Speed of a host's network, in Gbit/s; what it reaches, and not what is written on it.
        """
        num_bytes = sum(weight.shape.numel() * weight.dtype.itemsize for weight in weights)
        seconds = num_bytes * 8 / (gbit_s * 1e9)
        return cls(num_bytes, seconds * (1 - 1 / num_shards), seconds)

    @property
    def total_s(self) -> float:
        return self.gather_s + self.broadcast_s

    def describe(self, gbit_s: float) -> str:
        """Return a line for people."""
        return (
            f"weight sync: {self.num_bytes / GIB:.2f} GiB, about {self.total_s:.2g} s between hosts at {gbit_s:g} "
            f"Gbit/s (gather {self.gather_s:.2g} s, broadcast {self.broadcast_s:.2g} s), besides loading"
        )
