"""Process groups beside the trainer's: rank 0 sends tensors to the workers of servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from rlplug.rollout.servers.addresses import own_address

GroupBackend: TypeAlias = Literal["gloo", "nccl"]


class SendGroup:
    """A group that torch's registry does not know of, so that it neither joins nor outlives the trainer's own.

    Args:
        store: In which the members find each other, with the prefixes that the other side uses.
        address: Of rank 0, which the others reach; for gloo.
        timeout_s: Of a member that waits for a tensor.
    """

    def __init__(
        self, backend: GroupBackend, store: Store, rank: int, world_size: int, address: str, timeout_s: float
    ) -> None:
        self._backend = backend
        self._store: Any = store
        timeout = timedelta(seconds=timeout_s)
        make = _gloo if backend == "gloo" else _nccl
        self._group = make(store, rank, world_size, address, timeout)

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
