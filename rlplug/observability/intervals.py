"""Intervals of 95% over prompts (arXiv:2411.00640) of shares, means and differences: the one definition of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

LEAST: Final = 4
"""Fewest prompts of which an interval is stated."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its interval, which is ``None`` below four prompts, and where means are all alike."""

    mean: float
    low: float | None
    high: float | None
    num_prompts: int

    @property
    def direction(self) -> int:
        """Whether a difference is above 0, as 1, or below, as -1; 0 where that is not clear."""
        return 0 if self.low is None or self.high is None else (self.low > 0) - (self.high < 0)


def share_over(values: Sequence[float], ends: Sequence[float] = (0.0, 1.0)) -> Estimate | None:
    """Return the mean of values between two ends, one a prompt; ``None`` without values.

    The values, and half a prompt at each end, get random Dirichlet weights: the Bayesian bootstrap (Rubin, 1981) with
    Jeffreys' prior. Of values at the ends it is Jeffreys' interval (Brown, Cai and DasGupta, 2001).
    """
    if (number := len(values)) < LEAST:
        return Estimate(statistics.fmean(values), None, None, number) if values else None
    mean, rng = statistics.fmean(values), np.random.default_rng(0)
    different, counts = np.unique(values, return_counts=True)
    blocks = (rng.standard_gamma([*counts, 0.5, 0.5], (1000, len(counts) + 2)) for _ in range(20))  # need little memory
    means = [weights @ [*different, *ends] / weights.sum(axis=1) for weights in blocks]
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return Estimate(mean, min(low, mean), max(high, mean), number)


def mean_over(values: Sequence[float], of_samples: Sequence[float] = ()) -> Estimate | None:
    """Return the mean of values, one a prompt, by Student's t; ``None`` without values.

    Where ``of_samples``, the values of single samples, are two numbers alone, such as 0 and 1, it is a share.
    """
    found = sorted(set(of_samples))
    if len(found) == 2 or found in ([0], [1]):
        return share_over(values, found if len(found) == 2 else (0.0, 1.0))
    if (number := len(values)) < LEAST or len(set(values)) == 1:
        return Estimate(statistics.fmean(values), None, None, number) if values else None
    mean, half = statistics.fmean(values), student_t(number - 1) * statistics.stdev(values) / math.sqrt(number)
    return Estimate(mean, mean - half, mean + half, number)


def difference_of(before: Estimate, after: Estimate, correlation: float = 0.0) -> Estimate:
    """Return ``after`` less ``before``, with the interval that theirs give (Zou and Donner, 2008).

    Of Student's t and the ``correlation`` of the same prompts it is the paired t interval.
    """
    change = after.mean - before.mean
    if before.low is None or before.high is None or after.low is None or after.high is None:
        return Estimate(change, None, None, after.num_prompts)
    sides = ((after.mean - after.low, before.high - before.mean), (after.high - after.mean, before.mean - before.low))
    down, up = (math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b)) for a, b in sides)
    return Estimate(change, change - down, change + up, after.num_prompts)


def student_t(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t within 0.5%: Abramowitz and Stegun, 26.7.5, from 3 degrees on."""
    z, n = statistics.NormalDist().inv_cdf(0.975), float(degrees)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / n + second / n**2 + third / n**3 + fourth / n**4
