"""Weights over gloo, for machines without GPUs: a backend that vLLM loads into its workers."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import TCPStore

from rlplug.rollout.servers.process_group import SendGroup

BACKEND: Final = "rlplug_gloo"

TIMEOUT_S: Final = 300.0
"""Of a worker that waits for a tensor."""


def gloo_group(address: str, port: int, rank: int, world_size: int, timeout_s: float = TIMEOUT_S) -> SendGroup:
    """Join the group in which rank 0, which listens at ``address``, sends weights to all others."""
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout)
    return SendGroup("gloo", store, rank, world_size, address, timeout_s)


def register() -> None:
    """Tell vLLM of the backend: its processes call this at start, by the entry point ``vllm.general_plugins``."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # vLLM may load its plugins twice
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, make_engine.__name__)


def make_engine(*arguments: Any) -> Any:
    """Return the worker's side: vLLM's NCCL backend over gloo."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from rlplug_rollout_vllm.weights import repack

    class GlooWeightTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc, unused-ignore]
        def init_transfer_engine(self, init_info: Any) -> None:
            self.shutdown()
            parallel = self.parallel_config
            rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
            self.model_update_group = gloo_group(
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
            repack(self.model)

    return GlooWeightTransferEngine(*arguments)
