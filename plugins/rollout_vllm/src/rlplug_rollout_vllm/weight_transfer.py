"""How the workers of a vLLM server receive weights: backends that vLLM loads into them, over NCCL and over gloo.

vLLM's own backend for NCCL loads tensor by tensor through its layer-wise reload. These load a bucket at once, and copy
plain weights where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from rlplug_engines.servers.process_group import Rendezvous, SendGroup

OVER_NCCL: Final = "rlplug_nccl"
OVER_GLOO: Final = "rlplug_gloo"
"""For machines without GPUs, and where trainer and server share one: NCCL wants a GPU for each of its ranks."""
TIMEOUT_S: Final = 300.0  # for a worker that waits for a tensor


def register() -> None:
    """Tell vLLM of the backends: its processes call this at start, by the entry point ``vllm.general_plugins``."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for backend, function in ((OVER_NCCL, over_nccl), (OVER_GLOO, over_gloo)):
        with contextlib.suppress(ValueError):  # vLLM may load its plugins twice
            WeightTransferEngineFactory.register_engine(backend, __name__, function.__name__)


def over_nccl(*arguments: Any) -> Any:
    """Return the worker's side over NCCL."""
    return _make_engine(torch.device("cuda", torch.cuda.current_device()), arguments)


def over_gloo(*arguments: Any) -> Any:
    """Return the worker's side over gloo."""
    return _make_engine(torch.device("cpu"), arguments)


def _make_engine(group_device: torch.device, arguments: tuple[Any, ...]) -> Any:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from rlplug_rollout_vllm.weights import are_copied_in_place, repack

    class BucketTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc, unused-ignore]
        def init_transfer_engine(self, init_info: Any) -> None:
            self.shutdown()
            parallel = self.parallel_config
            rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
            rendezvous = Rendezvous(init_info.master_address, init_info.master_port, rank, init_info.world_size)
            self.model_update_group: SendGroup | None = SendGroup.over_tcp(rendezvous, group_device, TIMEOUT_S)

        def start_weight_update(self) -> None:
            self.is_in_place = are_copied_in_place(self.model, self.model_config)
            if not self.is_in_place:
                super().start_weight_update()

        @torch.no_grad()
        def update_weights(self, update_info: dict[str, Any]) -> None:
            weights = self._received(self.parse_update_info(update_info))
            self.model.load_weights(weights)
            for _ in weights:  # a model may ignore the last ones, and the trainer sends them all
                pass
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        def _received(self, update_info: Any) -> Iterator[tuple[str, torch.Tensor]]:
            assert self.model_update_group is not None
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                self.model_update_group.broadcast(weight)
                yield name, weight

        def finish_weight_update(self) -> None:
            if not self.is_in_place:
                super().finish_weight_update()
                repack(self.model)

        def shutdown(self) -> None:
            group, self.model_update_group = self.model_update_group, None
            if group is not None:
                group.destroy()

    return BucketTransferEngine(*arguments)
