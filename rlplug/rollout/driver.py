"""Drives any engine through a rollout: wake, sync, generate, sleep; and again after a fault."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlplug.batching import rank_share
from rlplug.errors import RunError
from rlplug.interfaces.rollout import EngineFault, Placement, PolicySpec, RolloutEngine
from rlplug.interfaces.weight_sync import Bucket
from rlplug.offload import Offload
from rlplug.phases import GIB
from rlplug.rollout.buckets import weight_buckets
from rlplug.rollout.lifecycle import Lifecycle
from rlplug.rollout.requests import make_requests, to_samples
from rlplug.types import Completion, Prompt, Request, Sample, SamplingParams

NO_VERSION = -1


class EngineDriver:
    """Owns this rank's engine: what it holds, and whether it is awake.

    Args:
        engine: Not started yet.
        policy: The sharded model whose weights the engine gets.
        spec: The policy, as the engine is told of it.
        placement: This rank.
        tokenizer: For the text of samples.
        hook: The plugins' hooks; ``rlplug_sync_weights`` runs the weight sync.
        sleeps: Give device memory back between rollouts.
        bucket_bytes: Size limit of the buckets in which weights travel.
        offload: What leaves the device meanwhile.
        any_rank: Returns whether its argument is true on some rank; collective.
        max_restarts: How often one rollout may start its engines anew after a fault.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        policy: nn.Module,
        spec: PolicySpec,
        placement: Placement,
        tokenizer: PreTrainedTokenizerBase,
        hook: Any,
        sleeps: bool,
        bucket_bytes: int,
        offload: Offload,
        any_rank: Callable[[bool], bool],
        max_restarts: int,
    ) -> None:
        self.engine = engine
        self._policy = policy
        self._spec = spec
        self._placement = placement
        self._tokenizer = tokenizer
        self._hook = hook
        self._sleeps = sleeps
        self._bucket_bytes = bucket_bytes
        self._offload = offload
        self._any_rank = any_rank
        self._max_restarts = max_restarts
        self._life = Lifecycle(type(engine).__name__, placement.device)
        self._version = NO_VERSION
        self._num_restarts = 0
        self._metrics: dict[str, float] = {}
        self._advised: set[str] = set()
        self._start()

    def complete(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: SamplingParams,
        key: str,
        version: int,
        first_group: int = 0,
    ) -> list[Sample]:
        """Return ``num_samples`` completions of each of this rank's share of ``prompts``.

        Args:
            prompts: Of all ranks, the same list on each.
            key: Names run and step; seeds follow from it.
            version: Of the policy; weights travel only when the engine holds others, or none after it slept.
            first_group: Number of the first prompt's group; the next prompt has the next one.
        """
        size = self.engine.ranks_per_engine
        number, seat = divmod(self._placement.rank, size)
        numbered = list(enumerate(prompts, start=first_group))
        asked = rank_share(numbered, number, self._placement.world_size // size)
        requests = make_requests([p for _, p in asked], [group for group, _ in asked], num_samples, key)
        completions = self._complete(requests, sampling, version)
        # ranks that share an engine divide what it returns, whole groups each
        mine = rank_share(range(len(asked)), seat, size)
        kept = [completions[index * num_samples + sample] for index in mine for sample in range(num_samples)]
        groups, kept_prompts = [asked[index][0] for index in mine], [asked[index][1] for index in mine]
        return to_samples(kept_prompts, groups, kept, self._tokenizer)

    def drain_metrics(self) -> dict[str, float]:
        """Return ``sync/...`` and the engine's ``rollout/...`` metrics since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def asleep_bytes(self, since: float) -> int:
        """Return what the engine has given back, if it slept all the time since ``since``, of ``time.perf_counter``."""
        return self._life.freed_bytes if self._life.state == "asleep" and self._life.slept_at <= since else 0

    def close(self) -> None:
        """Close the engine; safe to call twice."""
        with self._life.calls("close"):
            self.engine.close()

    # ---- a rollout ------------------------------------------------------------------------------------------------

    def _complete(self, requests: Sequence[Request], sampling: SamplingParams, version: int) -> list[Completion]:
        """Generate; after a fault on any rank, start all engines anew and ask for what is missing."""
        done: dict[str, Completion] = {}
        num_faults = 0
        while True:
            missing = [request for request in requests if request.request_id not in done]
            fault = self._attempt(missing, sampling, version, done)
            if not self._any_rank(fault is not None):
                break
            num_faults += 1
            self._restart(fault, num_faults, len(requests) - len(done))
        self._note_metrics()
        self._sleep()
        self._offload.after_generation()
        return [done[request.request_id] for request in requests]

    def _attempt(
        self, requests: Sequence[Request], sampling: SamplingParams, version: int, done: dict[str, Completion]
    ) -> EngineFault | None:
        """Add completions to ``done``; return what stopped the engine before it had them all."""
        needs_sync = self._version != version  # the same on all ranks
        buckets = weight_buckets(self._policy, self._spec.dtype, self._bucket_bytes) if needs_sync else iter(())
        try:
            self._prepare(buckets, version)
            with self._life.calls("generate"):
                completions, fault = self.engine.generate(requests, sampling), None
        except EngineFault as problem:
            for _ in buckets:  # each is a collective operation, in which other ranks wait
                pass
            completions, fault = problem.completions, problem
        done |= {completion.request_id: completion for completion in completions}
        return fault

    def _prepare(self, buckets: Iterator[Bucket], version: int) -> None:
        """Wake weights, sync, wake the KV cache, as far as the engine needs it.

        Never are both the KV cache and the sync's buckets on the device. The trainer's state makes room before each.
        """
        self._offload.before_engine_wakes()
        if self._life.state == "asleep":
            with self._life.calls("wake_weights"):
                self.engine.wake("weights")
        if self._version != version:
            self._version = NO_VERSION
            with self._life.calls("update_weights"):
                report = self._hook.rlplug_sync_weights(engine=self.engine, buckets=buckets, version=version)
            self._version = report.policy_version
            self._metrics["sync/seconds"] = report.seconds
            self._metrics["sync/gib"] = report.num_bytes / GIB
            self._metrics["sync/buckets"] = float(report.num_buckets)
        self._offload.before_generation()
        if self._life.state == "synced":
            with self._life.calls("wake_kv_cache"):
                self.engine.wake("kv_cache")

    def _sleep(self) -> None:
        if self._sleeps:
            with self._life.calls("sleep"):
                self.engine.sleep()
            self._version = NO_VERSION  # what slept must be sent again
            self._metrics["rollout/freed_gib"] = self._life.freed_bytes / GIB
            self._metrics["rollout/sleep_seconds"] = self._life.seconds["sleep"]

    def _note_metrics(self) -> None:
        self._metrics |= {f"rollout/{name}": value for name, value in self.engine.stats().items()}
        self._metrics["rollout/restarts"] = float(self._num_restarts)
        if self._sleeps:
            waking = self._life.seconds["wake_weights"] + self._life.seconds["wake_kv_cache"]
            self._metrics["rollout/wake_seconds"] = waking
        for advice in self.engine.advice():
            if advice not in self._advised:
                self._advised.add(advice)
                rank_zero_info(f"{type(self.engine).__name__}: {advice}")

    # ---- start and restart ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the engine where the trainer has made the room that it makes in every rollout."""
        self._offload.before_engine_wakes()
        self._offload.before_generation()
        with self._life.calls("start"):
            self.engine.start(self._spec, self._placement)
        self._sleep()
        self._offload.after_generation()

    def _restart(self, fault: EngineFault | None, num_faults: int, num_missing: int) -> None:
        """Start the engines of all ranks anew: some start together with others, and each needs the next sync."""
        name, problem = type(self.engine).__name__, fault or "the engine of another rank failed"
        if not self.engine.capabilities.restart:
            raise RunError(
                f"{name} failed, and cannot start again in this process: {problem} Go on from the newest checkpoint "
                "with rlplug fit --resume."
            ) from fault
        if num_faults > self._max_restarts:
            raise RunError(
                f"{name} failed again after {self._max_restarts} restarts in one rollout: {problem} The newest "
                "checkpoint is from before; model.max_engine_restarts allows more."
            ) from fault
        if fault is not None:
            warnings.warn(f"{name} starts anew, and {num_missing} requests follow again: {problem}", stacklevel=2)
        self._num_restarts += 1
        self._version = NO_VERSION
        self.close()
        self._start()
