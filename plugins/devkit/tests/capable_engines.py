"""HFRollout with what it lacks for a test of every check: it sleeps and it streams, or it serves adapters."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from rlplug_engines.colocated import max_completion_tokens
from torch import Tensor
from transformers import StoppingCriteria

from rlplug.interfaces import (
    AdapterWeights,
    Bucket,
    EngineCapabilities,
    Placement,
    PolicySpec,
    SleepingPart,
    SyncReport,
)
from rlplug.rollout.hf_engine import HFRollout
from rlplug.types import Completion, Request, SamplingParams
from rlplug.weight_sync.hf_names import hf_views
from rlplug.weight_sync.manifest import expected_tensors
from rlplug.weight_sync.receive_checks import WeightSyncValidator


class Aborted(StoppingCriteria):
    """Stops the generation of this thread's request when it was aborted."""

    def __init__(self) -> None:
        self.running = threading.local()
        self.request_ids: set[str] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        is_aborted = getattr(self.running, "request_id", None) in self.request_ids
        return torch.full((len(input_ids),), is_aborted)


class CapableRollout(HFRollout):
    """Drops its weights to sleep, and runs each submitted request in a thread of its own."""

    capabilities: EngineCapabilities = EngineCapabilities(sleep=True, streaming=True)

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        super().start(policy, placement)
        self._cache = torch.zeros(1 << 18, dtype=torch.uint8)
        """Stands for a KV cache that is there all the time, as real engines have it."""
        self._threads = ThreadPoolExecutor(8)
        self._finished: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished: set[str] = set()
        self._aborted = Aborted()
        self._stopping_criteria[1:] = [self._aborted]

    # ---- sleep ----------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        self._resize(0)
        self._cache = torch.zeros(0, dtype=torch.uint8)

    def wake(self, part: SleepingPart) -> None:
        if part == "weights":
            self._resize(1)
        else:
            self._cache = torch.zeros(1 << 18, dtype=torch.uint8)

    def _resize(self, share: int) -> None:
        for parameter in self._model.parameters():
            parameter.untyped_storage().resize_(share * parameter.numel() * parameter.element_size())

    def bytes_in_use(self) -> int:
        storages = [parameter.untyped_storage() for parameter in self._model.parameters()]
        return self._cache.nbytes + sum(storage.nbytes() for storage in storages)

    # ---- streaming ------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        for request in requests:
            max_completion_tokens(request, self._policy)  # refuses a prompt that does not fit
        with self._lock:
            self._unfinished |= {request.request_id for request in requests}
        for request in requests:
            self._threads.submit(self._run, request, sampling)

    def _run(self, request: Request, sampling: SamplingParams) -> None:
        self._aborted.running.request_id = request.request_id
        (completion,) = self.generate([request], sampling)
        with self._lock:
            self._unfinished.remove(request.request_id)
            if request.request_id in self._aborted.request_ids:
                self._aborted.request_ids.remove(request.request_id)
                if completion.finish_reason == "length" and len(completion.token_ids) < sampling.max_new_tokens:
                    completion = dataclasses.replace(completion, finish_reason="abort")
            self._finished.put(completion)

    def collect(self, timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        completions: list[Completion] = []
        while True:
            left = 0.0 if completions else max(0.0, deadline - time.monotonic())
            try:
                completions.append(self._finished.get(timeout=left) if left else self._finished.get_nowait())
            except queue.Empty:
                return completions

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._lock:
            self._aborted.request_ids |= self._unfinished & set(request_ids)

    def close(self) -> None:
        if getattr(self, "_model", None) is not None:
            self.abort(list(self._unfinished))
            self._threads.shutdown()
        super().close()


class ServesAdapters(HFRollout):
    """Keeps the frozen weights of its first sync, and computes with a copy to which each sync's adapters are added."""

    capabilities: EngineCapabilities = EngineCapabilities(adapters=True)

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        super().start(policy, placement)
        self._frozen: dict[str, Tensor] = {}
        self._latest: dict[str, Tensor] = {}

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        if self._policy.adapters is None:
            return super().update_weights(buckets, version)
        weights = expected_tensors(self._model, self._policy)
        adapters = self._policy.adapters.tensors(weights)
        expected = adapters if self._frozen else {**weights, **adapters}
        validator = WeightSyncValidator(type(self).__name__, expected)
        received = {name: tensor.clone() for bucket in validator.count(buckets) for name, tensor in bucket}
        self.require_all(validator)
        self._frozen = self._frozen or {name: received[name] for name in weights}
        self._latest |= {name: tensor for name, tensor in received.items() if name in adapters}
        self.restore(self._frozen)
        self._add(self._policy.adapters, self.merged(dict(self._latest)))
        self._version = version
        seconds = time.perf_counter() - validator._began
        return SyncReport(sum(t.nbytes for t in received.values()), 1, len(received), seconds, version)

    @torch.no_grad()
    def _add(self, adapters: AdapterWeights, tensors: dict[str, Tensor]) -> None:
        own = hf_views(self._model)
        for module in adapters.modules:
            down, up = (tensors[name] for name in adapters.names(module))
            own[f"{module}.weight"].addmm_(up, down, alpha=self.scale(adapters))

    # ---- what a mistake may change ----------------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self, weights: dict[str, Tensor]) -> None:
        """Copy the frozen weights into the model."""
        own = hf_views(self._model)
        for name, weight in weights.items():
            own[name].copy_(weight)

    def merged(self, received: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the adapters that are added."""
        return received

    def scale(self, adapters: AdapterWeights) -> float:
        return adapters.alpha / adapters.rank

    def require_all(self, validator: WeightSyncValidator) -> None:
        validator.require_all()
