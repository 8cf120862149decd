"""An engine that gives its memory back between rollouts, and counts how often."""

from __future__ import annotations

from rlplug.interfaces import EngineCapabilities, Placement, PolicySpec, SleepingPart
from rlplug.rollout.hf_engine import HFRollout


class SleepyRollout(HFRollout):
    """HFRollout that drops its model to sleep and builds an empty one to wake."""

    capabilities: EngineCapabilities = EngineCapabilities(sleep=True)

    def __init__(self, max_batch_size: int = 256) -> None:
        super().__init__(max_batch_size)
        self._num_sleeps = self._num_wakes = 0

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        self._placement = placement
        super().start(policy, placement)

    def sleep(self) -> None:
        self._num_sleeps += 1
        self._model = None

    def wake(self, part: SleepingPart) -> None:
        if part == "weights":
            self._num_wakes += 1
            super().start(self._policy, self._placement)

    def stats(self) -> dict[str, float]:
        return {**super().stats(), "sleeps": float(self._num_sleeps), "wakes": float(self._num_wakes)}
