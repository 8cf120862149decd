"""Estimates of an evaluation with their intervals: pass@k, means over prompts, paired differences.

Prompts are the units that were drawn at random, and samples of a prompt are alike: all intervals are of prompts, as
Miller, "Adding Error Bars to Evals", arXiv:2411.00640, recommends (clustered standard errors). They say how far the
figures would vary over other prompts of the same kind, and with other samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Z: Final = statistics.NormalDist().inv_cdf(0.975)
"""Quantile of the normal distribution for intervals of 95%."""
LEAST_PROMPTS: Final = 4
"""Fewest prompts of which an interval of a mean is stated."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its interval of 95%."""

    mean: float
    low: float | None
    """``None``, as ``high``, where there are too few prompts, or all of them are alike."""
    high: float | None
    num_prompts: int
    """Prompts that count in it."""


def proportion(values: Sequence[float], num_samples: int) -> Estimate | None:
    """Return the mean of values from 0 to 1, one a prompt, with Wilson's score interval; ``None`` without values.

    The interval is Wilson's (1927), as Brown, Cai and DasGupta, "Interval Estimation for a Binomial Proportion" (2001),
    recommend, with the effective sample size m p (1 - p) / s^2 of m prompts whose values have variance s^2: Franco et
    al., "Comparative Study of Confidence Intervals for Proportions in Complex Sample Surveys" (2019). With
    one sample a prompt this is Wilson's own. Where all prompts pass or none does it is that of m single samples.

    Args:
        values: Estimates of a chance, one a prompt.
        num_samples: Samples behind all of them together, which the effective size never exceeds.
    """
    number = len(values)
    if not number:
        return None
    mean = math.fsum(values) / number
    spread, variance = mean * (1 - mean), math.fsum((value - mean) ** 2 for value in values) / number
    size = float(number)
    if spread > 0:
        size = min(number * spread / variance, float(max(num_samples, number))) if variance > 0 else float(num_samples)
    middle = (mean + Z**2 / (2 * size)) / (1 + Z**2 / size)
    half = Z / (1 + Z**2 / size) * math.sqrt(max(spread, 0.0) / size + Z**2 / (4 * size**2))
    return Estimate(mean, max(0.0, middle - half), min(1.0, middle + half), number)


def mean_of(values: Sequence[float]) -> Estimate | None:
    """Return the mean of values, one a prompt, with Student's t interval; ``None`` without values.

    For differences of two policies on the same prompts this is the paired analysis that Miller recommends.
    """
    number = len(values)
    if not number:
        return None
    mean = math.fsum(values) / number
    if number < LEAST_PROMPTS or len(set(values)) == 1:
        return Estimate(mean, None, None, number)
    half = student_t(number - 1) * statistics.stdev(values) / math.sqrt(number)
    return Estimate(mean, mean - half, mean + half, number)


def student_t(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t distribution, within 0.5% from 3 degrees of freedom on.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.5.
    """
    z, n = Z, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / n**power for power, term in enumerate(terms, start=1))


def largest_ks(num_samples: int) -> list[int]:
    """Return 1, 2, 4, ... up to the samples of a prompt."""
    return [1 << power for power in range(num_samples.bit_length())]
