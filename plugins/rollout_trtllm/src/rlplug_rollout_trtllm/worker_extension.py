"""The extension that the engine's workers load, by name: their part of a weight sync. Imported in them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rlplug_engines.servers.process_group import Rendezvous, SendGroup
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension


class RLPlugWorkerExtension(WorkerExtension):  # type: ignore[misc, unused-ignore]
    """TensorRT-LLM's own extension, that waits for what it copies, and takes weights from a process group too.

    A worker has ``device_id``, the index of its GPU, and ``engine``, its executor.
    """

    def update_weights(self, ipc_handles: Mapping[str, str] | None = None) -> None:
        """Load what handles stand for, or finalise; return when it is done, since the trainer then frees its copy."""
        super().update_weights(ipc_handles)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def rlplug_join(self, rendezvous: Rendezvous, on_gpu: bool, timeout_s: float) -> str:
        """Join the group in which the trainer, its rank 0, sends weights; return the UUID of the worker's GPU."""
        worker: Any = self
        self.rlplug_leave()
        self._rlplug_device = torch.device("cuda", worker.device_id) if on_gpu else torch.device("cpu")
        self._rlplug_group: SendGroup | None = SendGroup.over_tcp(rendezvous, self._rlplug_device, timeout_s)
        return str(get_device_uuid(worker.device_id))

    def rlplug_receive(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Receive a bucket and load it, between an ``update_weights`` that opens a sync and the one that ends it."""
        assert self._rlplug_group is not None, "rlplug_join comes first"
        worker: Any = self
        weights = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            weights[name] = torch.empty(*shape, dtype=getattr(torch, dtype), device=self._rlplug_device)
            self._rlplug_group.broadcast(weights[name])
        loader = worker.engine.model_engine
        loader.model_loader.reload(loader.model, weights, allow_partial_loading=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def rlplug_leave(self) -> None:
        """Leave the group, if there is one."""
        group: SendGroup | None = getattr(self, "_rlplug_group", None)
        self._rlplug_group = None
        if group is not None:
            group.destroy()
