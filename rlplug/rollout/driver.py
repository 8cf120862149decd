"""Drives an engine through a rollout: wake, sync, generate, sleep, the same for every engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlplug.batching import rank_share
from rlplug.interfaces.rollout import Placement, PolicySpec, RolloutEngine
from rlplug.offload import Offload
from rlplug.phases import GIB
from rlplug.rollout.buckets import weight_buckets
from rlplug.rollout.requests import make_requests, to_samples
from rlplug.types import Prompt, Sample, SamplingParams


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
        self._version = -1
        self._metrics: dict[str, float] = {}
        engine.start(spec, placement)
        if sleeps:
            engine.sleep()

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
        rank, world_size = self._placement.rank, self._placement.world_size
        mine = rank_share(prompts, rank, world_size)
        groups = rank_share(range(first_group, first_group + len(prompts)), rank, world_size)
        requests = make_requests(mine, groups, num_samples, key)
        with self._awake(version):
            completions = self.engine.generate(requests, sampling)
        self._metrics |= {f"rollout/{name}": value for name, value in self.engine.stats().items()}
        return to_samples(mine, groups, completions, self._tokenizer)

    def drain_metrics(self) -> dict[str, float]:
        """Return ``sync/...`` and the engine's ``rollout/...`` metrics since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    @contextmanager
    def _awake(self, version: int) -> Iterator[None]:
        """Weights wake first and the KV cache after the sync, so that both are never beside the sync's buckets.

        The trainer's own state makes room before each of the two.
        """
        self._offload.before_engine_wakes()
        if self._sleeps:
            self.engine.wake(["weights"])
        if self._version != version:
            buckets = weight_buckets(self._policy, self._spec.dtype, self._bucket_bytes)
            report = self._hook.rlplug_sync_weights(engine=self.engine, buckets=buckets, version=version)
            self._version = report.policy_version
            self._metrics |= {"sync/seconds": report.seconds, "sync/gib": report.num_bytes / GIB}
        self._offload.before_generation()
        if self._sleeps:
            self.engine.wake(["kv_cache"])
        yield
        if self._sleeps:
            self.engine.sleep()
            self._version = -1  # what slept must be sent again
        self._offload.after_generation()
