"""Workers and what may be called on them: the contract's ``rpc``, and ``WorkerExtension``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rlplug.weight_sync.hf_names import hf_views
from trtllm_double import wire
from trtllm_double.contract import RPC, WIRE
from trtllm_double.weights import Weights


def get_device_uuid(device_idx: int) -> str:
    """Return the name of a GPU that there is not."""
    if type(device_idx) is not int or device_idx < 0:
        raise ValueError(f"a device index must be an int from 0, and is {device_idx!r}")
    return f"GPU-double-{device_idx}"


class WorkerExtension:
    """``tensorrt_llm.llmapi.rlhf_utils.WorkerExtension``: mixed into each worker, or a subclass is.

    The real one resets the prefix cache when it finalises (in some versions of 1.3); this one never does, so that an
    engine that counts on it is noticed.
    """

    def update_weights(self, ipc_handles: Mapping[str, str] | None = None) -> None:
        """Load a bucket (contract ``wire``), or finalise.

        Raises:
            ValueError: A uuid of no worker (``wire.unknown_uuid``), or a weight that does not fit.
            RuntimeError: A worker without a payload, or a handle that cannot be opened.
        """
        worker: Any = self
        if ipc_handles is None:
            worker.double_weights.finalise(worker.global_rank)
            return
        uuids = [get_device_uuid(device) for device in range(worker.world_size)]
        if unknown := [uuid for uuid in ipc_handles if uuid not in uuids]:
            raise ValueError(f"update_weights: {unknown} are no GPUs of the workers, which have {uuids}")
        if missing := [uuid for uuid in uuids if uuid not in ipc_handles]:
            raise RuntimeError(f"update_weights: nothing for {missing}: every worker needs {WIRE['weights']}")
        weights, used = {}, set()
        for name, (func, args) in wire.decode(ipc_handles[get_device_uuid(worker.device_id)]):
            handle, weights[name] = wire.open_handle(name, func, args, worker.device_id, worker.double_name)
            used.add(handle)
        worker.double_weights.load(worker.global_rank, weights, used)

    def reset_prefix_cache(self) -> None:
        """Forget what was calculated for prompts."""
        worker: Any = self
        worker.engine.reset_prefix_cache()


class Worker:
    """One GPU's part of an engine: ``device_id``, ``global_rank`` and ``engine`` are what an extension may use."""

    def __init__(self, engine: Any, rank: int, world_size: int, model: Any, weights: Weights) -> None:
        self.device_id = self.global_rank = rank
        self.world_size = world_size
        self.double_weights = weights
        self.double_name = (id(engine), rank)
        loader = SimpleNamespace(reload=self.double_reload)
        self.engine = SimpleNamespace(
            model_engine=SimpleNamespace(model=model, model_loader=loader),
            reset_prefix_cache=engine.forward.reset_prefix_cache,
        )
        self._engine = engine

    def double_reload(self, model: Any, weights: Mapping[str, Tensor], allow_partial_loading: bool = False) -> None:
        """Load weights that an extension got by itself: ``ModelLoader.reload`` of the sources."""
        if model is not self.engine.model_engine.model:
            raise ValueError("reload: another model than the engine's")
        names = hf_views(model).keys()
        if not allow_partial_loading and (missing := names - weights.keys()):
            raise RuntimeError(f"reload without allow_partial_loading: {sorted(missing)[:4]} are missing")
        self.double_weights.load(self.global_rank, weights, set())

    def sleep(self, sleep_tags: list[str]) -> None:
        """Release memory; the first worker does it for all."""
        if self.global_rank == 0:
            self._engine.release_memory(sleep_tags)

    def wakeup(self, wakeup_tags: list[str]) -> None:
        """Take memory again; the first worker does it for all."""
        if self.global_rank == 0:
            self._engine.resume_memory(wakeup_tags)


def worker_class(qualified_name: str) -> type[Worker]:
    """Return workers with an extension, as ``RayWorkerWrapper._inject_worker_extension`` of the sources makes them.

    Raises:
        RuntimeError: It cannot be imported.
        TypeError: It is no ``WorkerExtension``.
        ValueError: It defines what a worker has, or lacks what the contract's ``rpc`` needs.
    """
    module, _, name = str(qualified_name).rpartition(".")
    try:
        extension = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RuntimeError(f"Failed to load worker extension {qualified_name!r}: {error}") from error
    if not (isinstance(extension, type) and issubclass(extension, WorkerExtension)):
        raise TypeError(f"ray_worker_extension_cls={qualified_name!r} is no subclass of WorkerExtension")
    taken = [attribute for attribute in dir(extension) if not attribute.startswith("__") and hasattr(Worker, attribute)]
    if taken:
        raise ValueError(f"worker extension {qualified_name!r} defines {taken}, which workers have")
    made = type(f"Worker{name}", (Worker, extension), {})
    if lacking := [method for method in RPC if not hasattr(made, method)]:
        raise ValueError(f"workers have no {lacking}, which the contract lists")
    return made
