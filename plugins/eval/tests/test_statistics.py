"""pass@k of a prompt against enumeration, and differences of two policies on the same prompts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from rlplug_eval.folder import Row
from rlplug_eval.results import Group
from rlplug_eval.statistics import largest_ks, paired

from rlplug.observability.intervals import mean_over, share_over


def rows(*rewards):
    return tuple(Row("u", "p", "c", None, reward, "", "stop", 1, 1) for reward in rewards)


@pytest.mark.parametrize("passed", range(6))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples(passed):
    rewards = [1.0] * passed + [0.5] * (5 - passed)
    for k in range(1, 6):
        choices = list(itertools.combinations(rewards, k))
        expected = sum(max(choice) >= 0.9 for choice in choices) / len(choices)
        assert Group("u", rows(*rewards)).pass_at(k, 0.9) == pytest.approx(expected, abs=1e-12)


def test_a_failed_sample_is_no_pass_and_has_no_reward():
    """Alone catches a prompt that vanishes from pass@k with its errors, and a mean that takes them as 0."""
    group = Group("u", rows(1.0, None, 0.0, None))
    assert [group.pass_at(k, 1.0) for k in (1, 2, 4)] == pytest.approx([1 / 4, 1 / 2, 1.0])
    assert (group.mean_reward(), group.mean_length()) == (0.5, 1.0)
    failed = Group("u", rows(None, None))
    assert (failed.pass_at(1, 1.0), failed.mean_reward(), failed.mean_length()) == (0.0, None, None)


def test_differences_say_nothing_where_nothing_can_be_said():
    assert paired([], mean_over) is None
    assert paired([(0.5, 0.5)] * 50, share_over).low is None, "differences that are all 0 say nothing on how they vary"
    assert paired([(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)], share_over).low is None
    one = paired([(1.0, 0.0)] * 3 + [(1.0, 1.0)] * 17, share_over)
    assert one.mean == pytest.approx(0.15)
    assert one.low < 0.15 < one.high < 0.5
    assert largest_ks(1) == [1]
    assert largest_ks(6) == [1, 2, 4]


@pytest.mark.parametrize(
    ("prompts", "trials"), [(20, 150), pytest.param(5, 1500, marks=pytest.mark.nightly)], ids=["20", "5"]
)
def test_intervals_of_differences_hold_the_truth_as_often_as_they_say(prompts, trials):
    """Alone catches a difference that is taken as unpaired, or Student's t where few prompts differ (60% held)."""
    draw, held = np.random.default_rng(0), []
    for truth in (0.1, 0.5, 0.9):
        for spread in (0.5, 4.0):
            chances = draw.beta(truth * spread, (1 - truth) * spread, (trials, prompts))
            others = draw.binomial(4, chances * 0.8) / 4
            for mine, other in zip(draw.binomial(4, chances) / 4, others, strict=True):
                found = paired(list(zip(mine.tolist(), other.tolist(), strict=True)), share_over)
                if found.low is not None:
                    held.append(found.low <= 0.2 * truth <= found.high)
    assert 0.925 <= np.mean(held) <= 0.985
