"""An engine that gives its memory back between rollouts, and refuses a call that comes at the wrong time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from rlplug.interfaces import Bucket, EngineCapabilities, Placement, PolicySpec, SyncReport
from rlplug.rollout.hf import HFRollout
from rlplug.types import Completion, Request, SamplingParams


class SleepyRollout(HFRollout):
    """HFRollout that drops its model to sleep and builds an empty one to wake."""

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities(sleep=True)

    def __init__(self, max_batch_size: int = 256) -> None:
        super().__init__(max_batch_size)
        self._asleep: set[str] = set()
        self._num_sleeps = self._num_wakes = 0

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        self._placement = placement
        super().start(policy, placement)

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._asleep |= set(tags)
        self._num_sleeps += "weights" in tags
        if "weights" in tags:
            self._model = None
            self._version = None

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._asleep -= set(tags)
        self._num_wakes += "weights" in tags
        if "weights" in tags:
            super().start(self._policy, self._placement)

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        self._refuse_asleep("update_weights", {"weights"})
        return super().update_weights(buckets, version)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        self._refuse_asleep("generate", {"weights", "kv_cache"})
        return super().generate(requests, sampling)

    def stats(self) -> dict[str, float]:
        return {**super().stats(), "sleeps": self._num_sleeps, "wakes": self._num_wakes}

    def _refuse_asleep(self, call: str, needed: set[str]) -> None:
        if missing := sorted(self._asleep & needed):
            raise RuntimeError(f"{call} was called while {' and '.join(missing)} slept")
