"""Weights over gloo, for machines without GPUs: a backend that vLLM loads into its workers."""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

BACKEND: Final = "rlplug_gloo"

TIMEOUT_S: Final = 300.0
"""Of a worker that waits for a tensor."""


class GlooGroup:
    """A process group of its own: the trainer, rank 0, sends tensors to all others.

    Args:
        address: Where rank 0 listens.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout_s: float = TIMEOUT_S) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._store: Any = TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        # by default it takes the address that the host's name has, which other processes may not reach
        options._devices = [gloo.create_device(hostname=own_address(address))]
        self._group = gloo(self._store, rank, world_size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor, or receive one in place; as bytes, since gloo does not have every dtype."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

    def destroy(self) -> None:
        """Close its connections, on which others that wait in it fail."""
        self._group = self._store = None


def own_address(peer: str) -> str:
    """Return the address of this host that ``peer`` reaches."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing
        return str(probe.getsockname()[0])


def register() -> None:
    """Tell vLLM of the backend: its processes call this at start, by the entry point ``vllm.general_plugins``."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # vLLM may load its plugins twice
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, make_engine.__name__)


def make_engine(*arguments: Any) -> Any:
    """Return the worker's side: vLLM's NCCL backend over a :class:`GlooGroup`."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from rlplug_rollout_vllm.weights import repack_tied_head

    class GlooWeightTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc, unused-ignore]
        def init_transfer_engine(self, init_info: Any) -> None:
            self.shutdown()
            parallel = self.parallel_config
            rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
            self.model_update_group = GlooGroup(
                init_info.master_address, init_info.master_port, rank, init_info.world_size
            )

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # the base class synchronises an accelerator here
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                self.model_update_group.broadcast(weight)
                self.model.load_weights([(name, weight)])

        def finish_weight_update(self) -> None:
            super().finish_weight_update()
            repack_tied_head(self.model)

    return GlooWeightTransferEngine(*arguments)
