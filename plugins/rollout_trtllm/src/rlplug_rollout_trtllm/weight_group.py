"""The process group in which the trainer's rank 0 sends weights to workers on other GPUs and hosts."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import PrefixStore, TCPStore

from rlplug.rollout.servers.process_group import GroupBackend, SendGroup

STORE_PREFIX: Final = "rlplug"


def make_group(
    backend: GroupBackend, address: str, port: int, rank: int, world_size: int, timeout_s: float
) -> SendGroup:
    """Join the group; rank 0, the trainer, listens at ``address``."""
    store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=timedelta(seconds=timeout_s))
    return SendGroup(backend, PrefixStore(STORE_PREFIX, store), rank, world_size, address, timeout_s)
