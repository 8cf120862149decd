"""Intervals of 95%: against quadrature and published tables, and how often they hold the truth, by simulation."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from rlplug.observability.intervals import Estimate, difference_of, mean_over, share_over, student_t
from rlplug.training.validation.scores import pass_at_k

TRUTHS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
SPREADS = (0.3, 1.0, 4.0, 20.0)
"""Sums of the parameters of the beta distribution of prompts' chances: from nearly 0 or 1 each to nearly alike."""


def jeffreys(count, number):
    """Quantiles of Beta(count + 1/2, number - count + 1/2) by quadrature in the angle, where the density is smooth."""
    angle = (np.arange(200_000) + 0.5) * (math.pi / 2) / 200_000
    density = np.sin(angle) ** (2 * count) * np.cos(angle) ** (2 * (number - count))
    places = np.searchsorted(np.cumsum(density) / density.sum(), [0.025, 0.975])
    return np.sin(angle[places]) ** 2


@pytest.mark.parametrize(("count", "number"), [(2, 4), (1, 10), (15, 20), (81, 263)])
def test_of_single_samples_it_is_jeffreys_interval(count, number):
    """Alone catches a prior or a quantile that is another one."""
    found = share_over([1.0] * count + [0.0] * (number - count))
    width = found.high - found.low
    assert [found.low, found.high] == pytest.approx(jeffreys(count, number), abs=0.03 * width)


def test_ends_small_numbers_and_nothing():
    """Alone catches an interval without its mean in it, one of three prompts, and certainty from prompts all alike."""
    none, every = share_over([0.0] * 50), share_over([1.0] * 50)
    assert (none.low, every.high) == (0.0, 1.0)
    assert 0.03 < none.high < 0.07
    assert every.low == pytest.approx(1 - none.high, abs=0.003)
    assert share_over([]) is None
    assert mean_over([]) is None
    assert share_over([0.0, 1.0, 1.0]).low is None
    assert mean_over([1.0, 2.0, 3.0]).low is None
    assert mean_over([0.3] * 50).low is None, "of values that are all alike nothing is known but that"
    assert mean_over([0.0] * 50, [0.0] * 50) == none, "rewards that are 0 or 1 are shares"


def test_means_of_two_values_are_shares_and_others_are_students():
    """Alone catches Student's t of rewards 0 and 1, which holds the truth in 60% of few prompts near an end."""
    share, mean = share_over([0.25, 0.5, 1.0, 0.0]), mean_over([1.5, 2.0, 3.0, 1.0], [1.0, 3.0])
    assert [mean.mean, mean.low, mean.high] == pytest.approx([1 + 2 * x for x in (share.mean, share.low, share.high)])
    found = mean_over([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])
    half = 3.18245 * math.sqrt(5 / 3) / 2
    assert [found.low, found.high] == pytest.approx([2.5 - half, 2.5 + half], abs=5e-3 * half)


def test_student_t():
    for degrees, quantile in ((3, 3.18245), (5, 2.57058), (10, 2.22814), (30, 2.04227), (1000, 1.96234)):
        assert student_t(degrees) == pytest.approx(quantile, rel=5e-3 if degrees < 5 else 3e-4)


def test_a_difference_of_means_with_their_correlation_is_the_paired_t_interval():
    """Alone catches sides of the intervals that are exchanged, and a correlation of the wrong sign."""
    draw = np.random.default_rng(0)
    before = draw.normal(size=12)
    after = 0.6 * before + draw.normal(size=12)
    paired = mean_over((after - before).tolist())
    found = difference_of(
        mean_over(before.tolist()), mean_over(after.tolist()), float(np.corrcoef(before, after)[0, 1])
    )
    assert [found.mean, found.low, found.high] == pytest.approx([paired.mean, paired.low, paired.high])
    skew = difference_of(Estimate(0.1, 0.0, 0.5, 9), Estimate(0.9, 0.8, 1.0, 9))
    assert [skew.low, skew.high] == pytest.approx([0.8 - math.hypot(0.1, 0.4), 0.8 + math.hypot(0.1, 0.1)])
    assert (skew.direction, difference_of(Estimate(0.9, 0.8, 1.0, 9), Estimate(0.1, 0.0, 0.5, 9)).direction) == (1, -1)


# ---- how often they hold the truth ----------------------------------------------------------------------------------


@cache
def chances(num_samples, k):
    return np.array([pass_at_k(num_samples, passed, k) for passed in range(num_samples + 1)])


def true_pass_at(a, b, k):
    """Chance that one of k samples passes where chances of prompts are Beta(a, b)."""
    return 1 - math.prod((b + index) / (a + b + index) for index in range(k))


def coverage(prompts, samples, k, trials):
    """Share of intervals of pass@k with the truth in them, over all truths and spreads."""
    draw, held = np.random.default_rng(prompts), []
    for truth in TRUTHS:
        for spread in SPREADS:
            a, b = truth * spread, (1 - truth) * spread
            passed = draw.binomial(samples, draw.beta(a, b, (trials, prompts)))
            for values in chances(samples, k)[passed]:
                found = share_over(values.tolist())
                held.append(found.low - 1e-9 <= true_pass_at(a, b, k) <= found.high + 1e-9)
    return float(np.mean(held))


def test_intervals_of_pass_at_k_hold_the_truth_as_often_as_they_say():
    """Alone catches an interval of few prompts, or of 1 < k < n, that is too short: 60 to 92% held before."""
    found = {
        (prompts, samples, k): coverage(prompts, samples, k, trials=10)
        for prompts, samples, k in ((4, 8, 4), (6, 8, 1), (12, 16, 4), (30, 4, 2))
    }
    assert all(0.915 <= share <= 0.99 for share in found.values()), found  # 240 each: a standard error of 1.4%


@pytest.mark.nightly
@pytest.mark.parametrize("prompts", [4, 6, 10, 30])
def test_intervals_hold_the_truth_in_94_to_96_percent(prompts):
    """960 evaluations of each size, the truths and spreads above alike; a single truth of few prompts may differ."""
    sizes = ((1, 1), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8), (16, 4))
    found = {size: coverage(prompts, *size, trials=40) for size in sizes}
    print(prompts, {size: round(100 * share, 1) for size, share in found.items()})
    assert 0.94 <= np.mean(list(found.values())) <= 0.965
    assert all(0.925 <= share <= 0.975 for share in found.values()), found
