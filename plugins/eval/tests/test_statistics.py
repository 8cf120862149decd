"""Estimates of an evaluation and their intervals: formulas against enumeration, coverage by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from rlplug_eval.folder import Row
from rlplug_eval.results import Group
from rlplug_eval.statistics import largest_ks, mean_of, proportion

from rlplug.training.validation.scores import student_t


def rows(*rewards):
    return tuple(Row("u", "p", "c", None, reward, "", "stop", 1, 1) for reward in rewards)


@pytest.mark.parametrize("passed", range(6))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples(passed):
    rewards = [1.0] * passed + [0.5] * (5 - passed)
    for k in range(1, 6):
        choices = list(itertools.combinations(rewards, k))
        expected = sum(max(choice) >= 0.9 for choice in choices) / len(choices)
        assert Group("u", rows(*rewards)).pass_at(k, 0.9) == pytest.approx(expected, abs=1e-12)


def test_a_failed_reward_is_neither_a_pass_nor_a_fail():
    group = Group("u", rows(1.0, None, 0.0, None))
    assert group.pass_at(1, 1.0) == 0.5
    assert group.pass_at(2, 1.0) == 1.0
    assert group.pass_at(3, 1.0) is None
    assert group.mean_reward() == 0.5
    assert Group("u", rows(None)).mean_reward() is None


def test_with_one_sample_a_prompt_the_interval_is_wilsons():
    """Values of Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3."""
    for number, count, low, high in ((263, 81, 0.2553, 0.3662), (148, 15, 0.0624, 0.1605), (20, 0, 0.0, 0.1611)):
        found = proportion([1.0] * count + [0.0] * (number - count), number)
        assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_student_t():
    for degrees, quantile in ((3, 3.18245), (5, 2.57058), (10, 2.22814), (30, 2.04227), (1000, 1.96234)):
        assert student_t(degrees) == pytest.approx(quantile, rel=5e-3 if degrees < 5 else 3e-4)


@pytest.mark.parametrize(("prompts", "samples", "spread"), [(30, 1, 0.3), (100, 8, 0.5), (100, 8, 20.0), (20, 4, 0.05)])
def test_intervals_cover_the_truth_as_often_as_they_say(prompts, samples, spread):
    """Chances of prompts are beta distributed: from all alike to nearly 0 or 1 each. 1,500 evaluations are drawn."""
    draw, truth, trials = np.random.default_rng(0), 0.7, 1500
    chances = draw.beta(truth * spread, (1 - truth) * spread, (trials, prompts))
    means = draw.binomial(samples, chances) / samples
    rewards = draw.exponential(1.0, (trials, prompts))
    found = [
        (proportion(row.tolist(), prompts * samples), mean_of(other.tolist()))
        for row, other in zip(means, rewards, strict=True)
    ]
    for index, (true, lowest) in enumerate(((truth, 0.925), (1.0, 0.90))):  # a mean of exponentials is skewed
        covered = sum(pair[index].low <= true <= pair[index].high for pair in found) / trials
        assert lowest <= covered <= 0.98


def test_no_interval_where_nothing_can_be_said():
    assert proportion([], 0) is None
    assert mean_of([]) is None
    assert mean_of([0.0] * 50).low is None, "differences that are all 0 say nothing on how they vary"
    assert mean_of([1.0, 2.0, 3.0]).low is None
    sure = proportion([1.0] * 50, 400)
    assert sure.mean == 1.0
    assert 0.9 < sure.low < 0.95, "50 prompts that all pass are no proof of the 51st"
    assert math.isclose(sure.high, 1.0)
    assert largest_ks(1) == [1]
    assert largest_ks(6) == [1, 2, 4]
