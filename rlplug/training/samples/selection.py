"""Selection of a step's groups: how many prompts to draw, which groups train, and whether to draw again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlplug.errors import RunError
from rlplug.interfaces.checks.algorithms import check_selection
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.process_state import watched
from rlplug.types import Rollout, Sample, groups_of

if TYPE_CHECKING:
    from rlplug.interfaces.algorithm import Algorithm
    from rlplug.rollout.source import RolloutSource
    from rlplug.training.samples.metrics import GatherArrays

GROUP = np.dtype([("group", np.int64), ("is_accepted", np.bool_)])
"""What ranks tell each other of a group: whether some of its samples train."""


@dataclass(frozen=True)
class GroupSelection:
    """Collects the groups of a step, as the algorithm selects them. Each rank selects among the groups that it has.

    Args:
        algorithm: Algorithm of the run.
        prompts_per_step: Groups that a step takes.
        source: Where the groups come from.
        gather_arrays: Returns the concatenation of all ranks' arrays; collective.
    """

    algorithm: Algorithm
    prompts_per_step: int
    source: RolloutSource
    gather_arrays: GatherArrays

    def num_missing(self, rollout: Rollout) -> int:
        """Return how many groups ``rollout`` lacks."""
        return self.prompts_per_step - rollout.num_groups

    def num_prompts_wanted(self, rollout: Rollout) -> int:
        """Return how many prompts to draw: for the groups that ``rollout`` lacks, with over-sampling."""
        return self.source.num_prompts_wanted(self.num_missing(rollout), self.algorithm.over_sampling)

    def add(self, rollout: Rollout, samples: Sequence[Sample]) -> Rollout:
        """Return ``rollout`` with the samples that the algorithm selects; groups beyond the step's are surplus.

        Collective. ``samples`` are this rank's.
        """
        groups = groups_of(samples)
        call = PluginCall(self.algorithm, "select")
        with watched(call):
            chosen = [check_selection(call, group, self.algorithm.select(group)) for group in groups]
        mine = [(group[0].group, bool(some)) for group, some in zip(groups, chosen, strict=True)]
        found = np.sort(self.gather_arrays(np.array(mine, GROUP)), order="group")
        num_missing = self.num_missing(rollout)
        is_enough = found["is_accepted"].cumsum() - found["is_accepted"] >= num_missing
        surplus = set(found["group"][is_enough].tolist())
        for group, some in zip(groups, chosen, strict=True):
            is_surplus = group[0].group in surplus
            rollout = rollout.with_surplus(group) if is_surplus else rollout.with_group(group, some)
        return dataclasses.replace(
            rollout,
            num_groups=rollout.num_groups + int((found["is_accepted"] & ~is_enough).sum()),
            num_drawn=rollout.num_drawn + len(found),
            num_rounds=rollout.num_rounds + (len(found) > 0 and not self.awaits_groups),
        )

    def require_some(self, rollout: Rollout, step: int) -> None:
        """Raise ``RunError`` where the algorithm accepted none of a step's groups."""
        if not rollout.num_groups:
            raise RunError(
                f"step {step}: {type(self.algorithm).__name__} accepted none of the groups, after "
                f"{self.algorithm.max_refills} refills: every prompt is solved or hopeless. Use other prompts."
            )

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """Return ``filter/...``: rounds of prompts after the first, and the share of the groups that it lacks."""
        refills = max(rollout.num_rounds - 1.0, 0.0)
        return {"filter/refills": refills, "filter/missing_share": self.num_missing(rollout) / self.prompts_per_step}

    @property
    def awaits_groups(self) -> bool:
        """Whether some of the prompts that were drawn for this step are still generated, and train in it."""
        return self.source.awaits_groups

    def wants_more(self, rollout: Rollout) -> bool:
        """Return whether the step waits for groups, or generates a round of prompts, its first or a refill."""
        if self.awaits_groups:
            return True
        if self.num_missing(rollout) == 0:
            return False
        if not rollout.num_drawn:
            return True  # in a partial rollout each round brings the groups under way nearer to their end
        return rollout.num_rounds <= self.algorithm.max_refills
