"""``WorkerEngine``: the trainer's side of an engine that runs in one child process."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from rlplug.errors import ConfigError
from rlplug.interfaces.memory import EngineMemory, EngineMemoryRequest
from rlplug.interfaces.rollout import EngineCapabilities, EngineFault, Placement, PolicySpec, RolloutEngine
from rlplug.interfaces.weight_sync import Bucket, SyncReport
from rlplug.types import Completion, Request, SamplingParams
from rlplug.weight_sync.manifest import policy_weights
from rlplug.weight_sync.receive_checks import WeightSyncValidator
from rlplug_engines.colocated import EngineProcess, EngineRequests, EngineStats, RunningRequest, check_tokens
from rlplug_engines.flat_buckets import flatten_bucket
from rlplug_engines.workers.worker import Worker

COMMAND: Final = (sys.executable, "-m", "rlplug_engines.workers.host")
SHARED_MEMORY: Final = Path("/dev/shm")
SAMPLER_BYTES: Final = 20
"""Bytes per logit while sampling, as of :class:`~rlplug_engines.colocated.SeededSampler`."""


class WorkerRequests(EngineRequests[tuple[Any, str | None]]):
    """Requests in the child process."""

    engine: ClassVar[str] = "the engine's worker"

    def __init__(self, process: EngineProcess, policy: PolicySpec, stats: EngineStats, deadline_s: float) -> None:
        super().__init__(policy, policy.max_context, stats, deadline_s)
        self._process = process

    def start(self, requests: Sequence[RunningRequest]) -> None:
        self._process.submit([(r.name, r.request.prompt_ids, _asked_of(r)) for r in requests])

    def stop(self, requests: Sequence[RunningRequest]) -> None:
        self._process.abort([running.name for running in requests])

    def poll(self, timeout_s: float) -> list[tuple[str, tuple[Any, str | None]]]:
        return [(name, (answer, problem)) for name, answer, problem in self._process.outputs(timeout_s)]

    def read(self, running: RunningRequest, answer: tuple[Any, str | None]) -> Completion:
        generated, problem = answer
        if generated is None:
            raise EngineFault(f"request {running.request.request_id}: {problem}.")
        source = f"{self.engine}, for request {running.request.request_id},"
        token_ids, said = generated
        ids, logprobs = check_tokens(source, token_ids, said, running.max_tokens, self.policy.vocab_size)
        has_ended = len(ids) > 0 and int(ids[-1]) in self.policy.eos_token_ids
        reason: Any = "stop" if has_ended else "length"
        return Completion(running.request.request_id, ids, logprobs, reason, self.version)


def _asked_of(running: RunningRequest) -> Mapping[str, Any]:
    return {"sampling": running.sampling, "seed": running.request.seed, "max_tokens": running.max_tokens}


class WorkerEngine(RolloutEngine):
    """Rollout engine whose model runs in a child process, one for each rank of the trainer.

    A subclass names its :class:`Worker` in ``worker_class`` and gives its options. This class has the rest: limits,
    order and deadlines of requests, the checks of what comes back, weights in shared memory with their checks, a fault
    when the process dies, and its end, also with the trainer's.

    Args:
        max_batch_size: Most requests that the worker gets at once.
        start_deadline_s: Longest time until the worker is built.
        generate_deadline_s: Longest time of a request.
        sync_deadline_s: Longest time until a bucket is loaded.
        options: Keyword arguments of the worker; plain data.

    Attributes:
        worker_class: The author's part, a class that a new process can import.
    """

    capabilities: EngineCapabilities = EngineCapabilities(colocated=True)
    worker_class: ClassVar[type[Worker]]

    def __init__(
        self,
        max_batch_size: int = 256,
        start_deadline_s: float = 300.0,
        generate_deadline_s: float = 600.0,
        sync_deadline_s: float = 120.0,
        **options: Any,
    ) -> None:
        if max_batch_size < 1:
            raise ConfigError(f"rollout.max_batch_size is {max_batch_size}: give at least 1.")
        self.max_batch_size = max_batch_size
        self.start_deadline_s = start_deadline_s
        self.generate_deadline_s = generate_deadline_s
        self.sync_deadline_s = sync_deadline_s
        self._options = options
        self._process: EngineProcess | None = None

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        worker = self.worker_class
        arguments = {
            "path": sys.path,
            "worker": (worker.__module__, worker.__qualname__),
            "policy": policy,
            "device": str(placement.device),
            "max_batch_size": self.max_batch_size,
            "options": self._options,
        }
        self._policy, self._weights = policy, policy_weights(policy)
        self._process = EngineProcess(type(self).__name__, COMMAND, {}, arguments, self.start_deadline_s)
        self._stats = EngineStats(self.max_batch_size, 0, observes_scheduler=False)
        self._requests = WorkerRequests(self._process, policy, self._stats, self.generate_deadline_s)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        self._requests.is_stopping = self.is_stopping
        return self._requests.generate(requests, sampling)

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        validator = WeightSyncValidator(type(self).__name__, self._weights)
        folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.NamedTemporaryFile(prefix="rlplug-weights-", dir=folder) as file:
            for bucket in validator.count(buckets):
                flat, places = flatten_bucket(bucket)
                shared = torch.from_file(file.name, shared=True, size=flat.numel(), dtype=torch.uint8)
                shared.copy_(flat)
                self.process.call("load", file.name, places, deadline_s=self.sync_deadline_s)
        report = validator.report(version)
        self.process.call("finish_sync", deadline_s=self.sync_deadline_s)
        self._requests.version = version
        return report

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory | None:
        """Return the weights in the policy's dtype, and KV cache and logits of a batch; override it for others."""
        rows, weights = min(self.max_batch_size, needs.completions), needs.weight_bytes(policy.dtype.itemsize)
        return EngineMemory(
            weights=weights,
            kv_cache=rows * needs.longest * needs.kv_bytes_per_token,
            other=rows * needs.vocab_size * SAMPLER_BYTES,
            asleep=weights,
            kv_bytes_per_token=needs.kv_bytes_per_token,
            rows=rows,
            keeps_cache=False,
        )

    @property
    def process(self) -> EngineProcess:
        """The running child process."""
        assert self._process is not None, "start comes first"
        return self._process

    def stats(self) -> dict[str, float]:
        return self._stats.drain()

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
