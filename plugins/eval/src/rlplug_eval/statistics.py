"""Differences of two policies on the same prompts, with their intervals, and the k of pass@k."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rlplug.observability.intervals import Estimate, difference_of


def paired(pairs: Sequence[tuple[float, float]], estimate: Callable[[list[float]], Estimate | None]) -> Estimate | None:
    """Return the mean difference of pairs, one a prompt, as first less second; ``None`` without pairs.

    Args:
        pairs: Of each prompt.
        estimate: Estimates the mean of one side. Its intervals and the correlation of both sides give that of the
            difference, which prompts that are hard for both policies make narrower.
    """
    mine, others = [first for first, _ in pairs], [second for _, second in pairs]
    after, before = estimate(mine), estimate(others)
    if after is None or before is None:
        return None
    if len({first - second for first, second in pairs}) == 1:  # says nothing on how they vary
        return Estimate(after.mean - before.mean, None, None, len(pairs))
    both_vary = len(set(mine)) > 1 and len(set(others)) > 1
    return difference_of(before, after, statistics.correlation(mine, others) if both_vary else 0.0)


def largest_ks(num_samples: int) -> list[int]:
    """Return 1, 2, 4, ... up to the samples of a prompt."""
    return [1 << power for power in range(num_samples.bit_length())]
