"""Engines on the trainer's own GPUs: their start, their calls, and what ranks that share an engine exchange."""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info

from rlplug.errors import ConfigError, RLPlugError, RunError
from rlplug.interfaces.rollout import EngineFault, Placement, PolicySpec, RolloutEngine
from rlplug.interfaces.weight_sync import Bucket, SyncReport, TensorInfo
from rlplug.rollout.ranks import EngineRanks
from rlplug.types import Completion, Request, SamplingParams
from rlplug.weight_sync.manifest import policy_weights
from rlplug.weight_sync.receive_checks import WeightSyncValidator
from rlplug_engines.colocated.memory import MemoryAdvice, MemoryBefore, start_failure
from rlplug_engines.colocated.options import EngineOptions, deciding_options
from rlplug_engines.colocated.requests import EngineRequests
from rlplug_engines.colocated.stats import EngineStats
from rlplug_engines.fp8_engine_checks import check_fp8_fits


@dataclass(frozen=True)
class StartedEngine:
    """What an engine's start leads to."""

    version: str
    """Of the engine's library."""
    stats: EngineStats
    requests: EngineRequests[Any] | None
    """``None`` on a rank whose engine another rank owns."""


class TrackedEngine(RolloutEngine):
    """An engine whose requests run in :class:`EngineRequests`; ``start`` makes these, ``_stats`` and ``_weights``.

    Args:
        options: How the engine is built.
        caches_prefixes: Whether a conversation's cache stays between its turns.
        generate_deadline_s: For a rollout, or for a request that was submitted.
    """

    _stats: EngineStats
    _weights: Mapping[str, TensorInfo]

    def __init__(self, options: EngineOptions, caches_prefixes: bool, generate_deadline_s: float) -> None:
        self.options = options
        self.generate_deadline_s = generate_deadline_s
        self.deciding_options = deciding_options(options)
        self._requests: EngineRequests[Any] | None = None
        self.capabilities = replace(self.capabilities, multi_turn=caches_prefixes)
        self.context_key = f"rollout.{options.written(options.context_key)}"

    def max_context(self, policy: PolicySpec) -> int:
        return self.options.longest(policy)

    def check(self, policy: PolicySpec) -> None:
        check_fp8_fits(type(self).__name__, policy, self.options.tensor_parallel_size)

    def size_options(self, policy: PolicySpec, requests: int, prompt_tokens: int) -> dict[str, Any]:
        return self.options.changes_for(policy, requests, prompt_tokens)

    # ---- generation -----------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        self.requests.is_stopping = self.is_stopping
        return self.requests.generate(requests, sampling)

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self._streaming.submit(requests, sampling)

    def collect(self, timeout_s: float) -> list[Completion]:
        return self._streaming.collect(timeout_s)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._streaming.abort(request_ids)

    def stats(self) -> dict[str, float]:
        return self._stats.drain()

    def advice(self) -> list[str]:
        return self._stats.advice()

    @property
    def requests(self) -> EngineRequests[Any]:
        """Requests that run in this rank's engine."""
        assert self._requests is not None, "start comes first, and another rank may own the engine"
        return self._requests

    @property
    def _streaming(self) -> EngineRequests[Any]:
        if not self.capabilities.streaming:
            raise self._cannot("streaming")
        return self.requests

    def validator(self, expected: Mapping[str, TensorInfo] | None = None) -> WeightSyncValidator:
        """Return what checks the buckets of one weight sync: by default, of all weights."""
        return WeightSyncValidator(type(self).__name__, self._weights if expected is None else expected)


class ColocatedEngine(TrackedEngine):
    """An engine on the trainer's own GPUs. With tensor parallelism, consecutive ranks run one engine together.

    This class has every rank call its part of the engine, and return what that returns.

    Args:
        options: How the engine is built.
        caches_prefixes: Whether a conversation's cache stays between its turns.
        generate_deadline_s: For a rollout, or for a request that was submitted.
    """

    engine: ClassVar[str]
    """Name of the engine, for messages."""
    elsewhere: ClassVar[str]
    """The way to use the engine on GPUs of its own, for messages."""

    def __init__(self, options: EngineOptions, caches_prefixes: bool, generate_deadline_s: float) -> None:
        super().__init__(options, caches_prefixes, generate_deadline_s)
        # ranks that share an engine generate together
        self.capabilities = replace(self.capabilities, streaming=options.tensor_parallel_size == 1)

    # ---- the engine's own -----------------------------------------------------------------------------------------

    @abstractmethod
    def launch(self, policy: PolicySpec, placement: Placement) -> StartedEngine:
        """Start the engine. When that fails, ``close`` is called.

        Raises:
            EngineFault: The engine did not start; the message is what it said.
        """

    @abstractmethod
    def memory_advice(self, memory: MemoryBefore, weight_bytes: int, longest: int) -> MemoryAdvice:
        """Return what the engine asked for and what to set, for the message that it did not start on a GPU.

        Args:
            memory: Of the GPU before.
            weight_bytes: Of the model on this GPU.
            longest: Prompt and completion together, in tokens.
        """

    def memory_before(self, placement: Placement) -> MemoryBefore | None:
        """Return the memory of the GPU before the engine starts; ``None`` on a CPU."""
        return MemoryBefore.of(placement.device) if placement.device.type == "cuda" else None

    # ---- start ----------------------------------------------------------------------------------------------------

    @property
    def ranks_per_engine(self) -> int:
        return self.options.tensor_parallel_size

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        began, size = time.perf_counter(), self.ranks_per_engine
        self.prepare(policy, placement)
        if placement.world_size % size:
            raise ConfigError(
                f"rollout.tensor_parallel_size is {size}, and the trainer has {placement.world_size} ranks: give a "
                f"divisor of that, or {self.elsewhere}."
            )
        self._placement = placement
        self._weights = policy_weights(policy)
        self.join_ranks(placement)
        memory = self.memory_before(placement)
        try:
            started = self.launch(policy, placement)
        except EngineFault as fault:
            self.close()
            if memory is None:
                raise RunError(f"{self.engine} did not start: {fault}") from fault
            weight_bytes = sum(weight.num_bytes for weight in self._weights.values()) // size
            advice = self.memory_advice(memory, weight_bytes, self.options.longest(policy))
            raise start_failure(self.engine, str(fault), memory, advice) from fault
        except RLPlugError:
            self.close()
            raise
        self._stats, self._requests = started.stats, started.requests
        cache = f"a KV cache of {self._stats.kv_cache_tokens:,} tokens"
        sizes = f"up to {self._stats.max_num_seqs} requests at once, {cache}; " if self._stats.kv_cache_tokens else ""
        rank_zero_info(f"{self.engine} {started.version}: {sizes}started in {time.perf_counter() - began:.0f} s")

    def join_ranks(self, placement: Placement) -> None:
        """Join the ranks that share this rank's engine."""


class FirstRankEngine(ColocatedEngine):
    """A colocated engine in processes of its own. The first of the ranks that share it owns it and broadcasts results.

    Each rank's weights stay on its GPU: ranks send handles to the first, which gives them to the engine.

    Args:
        options: How the engine is built.
        caches_prefixes: Whether a conversation's cache stays between its turns.
        generate_deadline_s: For a rollout, or for a request that was submitted.
        longest_call_s: For any other call of the engine.
    """

    def __init__(
        self, options: EngineOptions, caches_prefixes: bool, generate_deadline_s: float, longest_call_s: float
    ) -> None:
        super().__init__(options, caches_prefixes, generate_deadline_s)
        self._waiting_s = max(generate_deadline_s, longest_call_s)
        self._ranks: EngineRanks | None = None

    # ---- the engine's own -----------------------------------------------------------------------------------------

    @abstractmethod
    def begin_sync(self) -> None:
        """Get ready for new weights."""

    @abstractmethod
    def load_bucket(self, bucket: Bucket, version: int) -> None:
        """Load one bucket; all ranks call it."""

    @abstractmethod
    def abandon_sync(self) -> None:
        """End a sync that was refused, or broke off, so that another may begin."""

    @abstractmethod
    def finish_sync(self, version: int) -> None:
        """End a sync that brought every weight."""

    # ---- shared ---------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> EngineRanks:
        """The ranks that share this rank's engine."""
        assert self._ranks is not None, "start comes first"
        return self._ranks

    def join_ranks(self, placement: Placement) -> None:
        if self._ranks is None:  # once: a restart finds the same ranks
            self._ranks = EngineRanks(placement, self.ranks_per_engine, self._waiting_s)
        require_neighbours(self._ranks, self.engine, placement.device.index or 0)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        generate = super().generate
        return self.ranks.from_first(lambda: generate(requests, sampling))

    def stats(self) -> dict[str, float]:
        return self.ranks.from_first(self._stats.drain)

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        validator = self.validator()
        self.begin_sync()
        try:
            for bucket in validator.count(buckets):
                self.load_bucket(bucket, version)
            report = validator.report(version)
        except EngineFault:
            raise
        except Exception:
            self.abandon_sync()
            raise
        self.finish_sync(version)
        if self._requests is not None:
            self._requests.version = version
        return report


def require_neighbours(ranks: EngineRanks, engine: str, index: int) -> None:
    """Stop the run unless the GPUs of the ranks are neighbours, in the order of the ranks. Collective.

    Args:
        ranks: Those that share an engine.
        engine: Its name, for the message.
        index: Of this rank's GPU.

    Raises:
        ConfigError: They are not.
    """
    devices = ranks.gathered((socket.gethostname(), index))

    def check() -> None:
        host, first = devices[0]
        if devices != [(host, first + number) for number in range(ranks.size)]:
            named, rank = ", ".join(f"{name} GPU {number}" for name, number in devices), ranks.engine * ranks.size
            raise ConfigError(
                f"rollout.tensor_parallel_size is {ranks.size}, and ranks {rank} to {rank + ranks.size - 1} run on "
                f"{named}: {engine} needs neighbouring GPUs of one host, in the order of the ranks. Set a smaller "
                "size, or one that divides the GPUs of each host."
            )

    ranks.from_first(check)
