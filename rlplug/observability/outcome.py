"""Whether a run learned: the reward before and after, by one definition for the terminal, report, card and Python."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

ENDS: Final = 5
"""Most steps at each end of a run whose mean is the training reward before and after."""


@dataclass(frozen=True)
class RewardChange:
    """Mean reward at the beginning and at the end of a run."""

    before: float
    after: float
    num_steps: int = 0
    """Steps of which each is a mean; 0 for a validation."""
    intervals: tuple[tuple[float, float], tuple[float, float]] | None = None
    """Those of 95% over prompts, for validations of enough prompts."""

    @property
    def verdict(self) -> str:
        """What the change amounts to, in a few words; empty where there are no intervals."""
        if self.intervals is None:
            return ""
        from rlplug.observability.intervals import Estimate, difference_of

        ends = zip((self.before, self.after), self.intervals, strict=True)
        before, after = (Estimate(mean, low, high, 0) for mean, (low, high) in ends)
        words = {1: "the policy learned", 0: "no clear change", -1: "it got worse"}
        return words[difference_of(before, after).direction]


def training_reward(rows: Sequence[Mapping[str, Any]]) -> RewardChange | None:
    """Return the mean reward of a run's first and last steps, 5 each or half of them; ``None`` without steps."""
    rewards = [row["reward/mean"] for row in rows if math.isfinite(row.get("reward/mean", math.nan))]
    if not rewards:
        return None
    return RewardChange(*ends_of(rewards))


def ends_of(values: Sequence[float]) -> tuple[float, float, int]:
    """Return the means of the first and of the last values, and the number of each: 5, or half of them."""
    count = max(1, min(ENDS, len(values) // 2))
    return statistics.fmean(values[:count]), statistics.fmean(values[-count:]), count


def held_out_reward(rows: Sequence[Mapping[str, Any]]) -> RewardChange | None:
    """Return the mean reward of the first and the last validation; ``None`` where there are not two."""
    found = [row for row in rows if math.isfinite(row.get("validate/reward_mean", math.nan))]
    if len(found) < 2:
        return None
    first, last = found[0], found[-1]
    ends: list[Any] = [(row.get("validate/reward_low"), row.get("validate/reward_high")) for row in (first, last)]
    intervals = None if any(None in each for each in ends) else (ends[0], ends[1])
    return RewardChange(first["validate/reward_mean"], last["validate/reward_mean"], 0, intervals)
