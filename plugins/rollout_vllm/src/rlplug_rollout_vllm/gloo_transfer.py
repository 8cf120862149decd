"""Weights over gloo, for machines without GPUs: a backend that vLLM loads into its workers."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch

from rlplug.rollout.servers.process_group import Rendezvous, SendGroup

BACKEND: Final = "rlplug_gloo"
TIMEOUT_S: Final = 300.0  # for a worker that waits for a tensor


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
            rendezvous = Rendezvous(init_info.master_address, init_info.master_port, rank, init_info.world_size)
            self.model_update_group = SendGroup.over_tcp(rendezvous, torch.device("cpu"), TIMEOUT_S)

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
