"""Held-out prompts that are generated beside the training groups of an asynchronous rollout, by a single policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlplug.rollout.trajectory import Trajectory
from rlplug.types import SamplingParams


@dataclass(frozen=True)
class HeldOutRollout:
    """Trajectories of a validation, all of whose tokens come from one version of the policy."""

    trajectories: Sequence[Trajectory]
    """Those of this rank's engine, whole groups."""
    sampling: SamplingParams
    """How they are drawn; ``max_new_tokens`` is that of the training groups."""
    version: int
    """Version of the policy."""
    num_groups: int
    """Groups of all engines."""

    def complete(self) -> list[int]:
        """Return the numbers of the groups of this rank's engine whose trajectories are all finished."""
        unfinished = {each.group for each in self.trajectories if each.finish_reason is None}
        return sorted({each.group for each in self.trajectories} - unfinished)

    @property
    def num_unfinished(self) -> int:
        """Trajectories of this rank's engine that want more tokens."""
        return sum(each.finish_reason is None for each in self.trajectories)
