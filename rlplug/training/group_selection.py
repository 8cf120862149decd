"""Selection of a step's groups: how many prompts to draw, which groups train, and whether to draw again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlplug.interfaces.algorithm import Algorithm
from rlplug.rollout.partial.state import PartialRolloutState
from rlplug.types import Rollout, Sample


@dataclass(frozen=True)
class GroupSelection:
    """Collects the groups of a step, as the algorithm selects them.

    Args:
        algorithm: Algorithm of the run.
        prompts_per_step: Groups that a step takes.
        partial_rollout: Groups under way in a partial rollout.
    """

    algorithm: Algorithm
    prompts_per_step: int
    partial_rollout: PartialRolloutState | None

    def num_missing(self, rollout: Rollout) -> int:
        """Return how many groups ``rollout`` lacks."""
        return self.prompts_per_step - rollout.num_groups

    def num_prompts_wanted(self, rollout: Rollout) -> int:
        """Return how many prompts to draw: for the groups that ``rollout`` lacks, with over-sampling."""
        if self.partial_rollout is not None:
            return self.partial_rollout.num_wanted(self.num_missing(rollout))
        return math.ceil(self.num_missing(rollout) * self.algorithm.over_sampling)

    def add(self, rollout: Rollout, samples: Sequence[Sample]) -> Rollout:
        """Return ``rollout`` with the samples that the algorithm selects; groups beyond the step's are surplus."""
        num_missing = self.num_missing(rollout)
        for group in Rollout(tuple(samples)).groups():
            if num_missing == 0:
                rollout = rollout.with_surplus(group)
                continue
            chosen = self.algorithm.select(group)
            rollout = rollout.with_group(group, chosen)
            num_missing -= bool(chosen)
        return rollout

    def wants_refill(self, rollout: Rollout, refill: int) -> bool:
        """Return whether to generate once more before the update; ``refill`` counts from 0."""
        if self.num_missing(rollout) == 0:
            return False
        if self.partial_rollout is not None and not rollout.drawn:
            return True  # each round brings the groups under way nearer to their end
        return refill < self.algorithm.max_refills
