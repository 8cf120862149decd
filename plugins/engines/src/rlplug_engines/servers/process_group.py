"""Process groups beside the trainer's own, in which its rank 0 sends tensors to the workers of engines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from rlplug.distributed.ranks import listening_store
from rlplug_engines.servers.addresses import own_address

GroupBackend: TypeAlias = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Rendezvous:
    """Address at which the members of a group meet, and the rank of one of them."""

    address: str
    port: int
    rank_offset: int
    """Rank of a server's first worker; 0 for the trainer."""
    world_size: int

    def payload(self) -> dict[str, Any]:
        """Return it under the names that vLLM and SGLang use."""
        return {
            "master_address": self.address,
            "master_port": self.port,
            "rank_offset": self.rank_offset,
            "world_size": self.world_size,
        }


class Group(Protocol):
    """Carries tensors from the trainer, its rank 0, to all workers."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor, on a GPU in the order of the current stream."""

    def destroy(self) -> None:
        """Leave the group; also one in which a transfer hangs."""


class SendGroup:
    """A process group outside torch's registry, so that it neither joins nor outlives the trainer's own.

    Args:
        store: The members find each other in it; it has the prefixes that the other side uses.
        address: An address of rank 0 that the others reach; for gloo.
        timeout_s: For a member that waits for a tensor.
    """

    def __init__(
        self, backend: GroupBackend, store: Store, rank: int, world_size: int, address: str, timeout_s: float
    ) -> None:
        self._backend = backend
        self._store: Any = store
        timeout = timedelta(seconds=timeout_s)
        make = _gloo if backend == "gloo" else _nccl
        self._group = make(store, rank, world_size, address, timeout)

    @classmethod
    def over_tcp(
        cls, rendezvous: Rendezvous, device: torch.device, timeout_s: float, prefixes: Sequence[str] = ()
    ) -> SendGroup:
        """Join a group of NCCL for a GPU, and of gloo for a CPU, whose rank 0 listens at the rendezvous.

        The store listens on the rendezvous' address alone, which is loopback unless a server runs on another host.
        It has no password: torch's TCPStore takes writes from whoever reaches that address.

        Args:
            prefixes: Those that the other side's keys begin with, in this order.
        """
        is_master = rendezvous.rank_offset == 0
        address, size = rendezvous.address, rendezvous.world_size
        timeout = timedelta(seconds=timeout_s)
        store: Store = listening_store(address, rendezvous.port, size, is_master, timeout)
        for prefix in prefixes:
            store = PrefixStore(prefix, store)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            backend: GroupBackend = "nccl" if device.type == "cuda" else "gloo"
            return cls(backend, store, rendezvous.rank_offset, size, address, timeout_s)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor, or receive one in place; over NCCL in the order of the current stream."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self._backend == "gloo":  # as bytes, since it does not have every dtype
            tensor = tensor.view(-1).view(torch.uint8)
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        """Close its connections, on which others that wait in it fail; also when a transfer hangs."""
        group, self._group, self._store = self._group, None, None
        if self._backend == "nccl" and group is not None:
            group.abort()


def _gloo(store: Store, rank: int, world_size: int, address: str, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # by default it takes the address that the host's name has, which other processes may not reach
    options._devices = [gloo.create_device(hostname=own_address(address))]
    return gloo(store, rank, world_size, options)


def _nccl(store: Store, rank: int, world_size: int, _: str, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    with _variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):  # else its watchdog ends the trainer when a server is gone
        return nccl(store, rank, world_size, options)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    former = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if former is None:
            del os.environ[name]
        else:
            os.environ[name] = former
