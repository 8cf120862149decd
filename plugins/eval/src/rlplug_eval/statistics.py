"""Estimates of an evaluation with their intervals: pass@k, means over prompts, paired differences.

Prompts are the units that were drawn at random, and samples of a prompt are alike: all intervals are of prompts, as
Miller, "Adding Error Bars to Evals", arXiv:2411.00640, recommends (clustered standard errors). They say how far the
figures would vary over other prompts of the same kind, and with other samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlplug.training.validation.scores import LEAST_PROMPTS, Z, margin_of


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
    half = margin_of(values)
    return Estimate(mean, mean - half, mean + half, number)


def largest_ks(num_samples: int) -> list[int]:
    """Return 1, 2, 4, ... up to the samples of a prompt."""
    return [1 << power for power in range(num_samples.bit_length())]
