"""The oracles themselves: gradients derived by hand against central differences, and figures worked out on paper."""

from __future__ import annotations

import math

import numpy
import oracle_algorithms
import oracles
import pytest
from algorithm_cases import CASES, WITH_CRITIC, ready
from random_batches import MAX_NEW_TOKENS, denominators_of, random_batch

STEP = 1e-6


def differences(value, at, mask):
    """Central differences of ``value(at)`` in every masked element."""
    out = numpy.zeros(at.shape)
    for i, t in zip(*mask.nonzero(), strict=True):
        up, down = at.copy(), at.copy()
        up[i, t] += STEP
        down[i, t] -= STEP
        out[i, t] = (value(up) - value(down)) / (2 * STEP)
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_of_the_loss(case):
    nonzero = 0
    for seed in (3, 4):
        draw = random_batch(seed)
        batch = ready(case, draw)[1]
        data, denominators = oracle_algorithms.arrays(batch), denominators_of(batch)
        now, entropy = draw.logprobs.detach().numpy(), draw.entropy.detach().numpy()

        def loss(logprobs, entropy, data=data, denominators=denominators, now=now):
            inputs = data, logprobs, entropy, case.oracle, denominators, MAX_NEW_TOKENS
            return oracle_algorithms.loss(*inputs, frozen=now)

        expected, mask = loss(now, entropy), data.response_mask
        by_logprobs = differences(lambda x: loss(x, entropy).loss, now, mask)  # noqa: B023 - called at once
        by_entropy = differences(lambda x: loss(now, x).loss, entropy, mask)  # noqa: B023
        numpy.testing.assert_allclose(expected.gradient, by_logprobs, rtol=1e-6, atol=1e-8)
        numpy.testing.assert_allclose(expected.entropy_gradient, by_entropy, rtol=1e-6, atol=1e-8)
        nonzero += numpy.abs(expected.gradient).max() > 1e-3
    assert nonzero


@pytest.mark.parametrize("case", WITH_CRITIC, ids=str)
def test_gradient_of_the_value_loss(case):
    draw = random_batch(3)
    batch = ready(case, draw)[1]
    data, now, clip = oracle_algorithms.arrays(batch), draw.values.detach().numpy(), case.oracle["value_clip"]

    def loss(values):
        return oracle_algorithms.value_loss(data, values, clip, denominators_of(batch))

    numpy.testing.assert_allclose(
        loss(now)[1], differences(lambda x: loss(x)[0], now, data.response_mask), rtol=1e-6, atol=1e-8
    )
    assert (loss(now)[2] > 0) == (clip is not None)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_unweighted"])
def test_derivative_of_the_penalty(estimator):
    for logprob, old, ref in [(-1.0, -1.3, -0.4), (-2.0, -1.9, -2.5), (-0.1, -0.1, -4.0)]:
        derivative = oracles.kl_penalty(logprob, old, ref, estimator)[1]
        up, down = (oracles.kl_penalty(logprob + step, old, ref, estimator)[0] for step in (STEP, -STEP))
        assert derivative == pytest.approx((up - down) / (2 * STEP), rel=1e-6)


def test_generalized_advantages_by_hand():
    """Rewards 0, 1 and values 0.5, 0.25 with gamma 0.5, lambda 0.5: deltas -0.375 and 0.75."""
    mask = numpy.array([[False, True, False, True]])
    rewards, values = numpy.array([[9.0, 0.0, 9.0, 1.0]]), numpy.array([[9.0, 0.5, 9.0, 0.25]])
    out = oracles.generalized_advantages(rewards, values, mask, 0.5, 0.5)
    assert out.tolist() == [[0.0, -0.375 + 0.25 * 0.75, 0.0, 0.75]]


def test_punishment_by_hand():
    """L_max 10 and L_cache 4: from 6 tokens on, a quarter per token."""
    figures = [oracles.overlong_punishment(length, 10, 4) for length in (0, 6, 7, 8, 10, 11, 50)]
    assert figures == [0, 0, -0.25, -0.5, -1, -1, -1]


def test_length_adaptive_lambda_by_hand():
    """alpha 0.5: lengths 0 and 2 give 0, 4 gives 1/2, 8 gives 3/4."""
    mask = numpy.arange(8) < numpy.array([[0], [2], [4], [8]])
    assert oracles.length_adaptive_lambda(mask, 0.5).tolist() == [0, 0, 0.5, 0.75]


# rewards 1, 0, 0, 1: mean 1/2, unbiased variance 4 x 1/4 / 3 = 1/3; the others' means are 1/3 and 2/3
def test_group_statistics_by_hand():
    rewards, valid, groups = numpy.array([1.0, 0, 0, 1, 5]), numpy.array([1, 1, 1, 1, 0]) > 0, numpy.full(5, 2)
    relative = oracles.group_relative(rewards, valid, groups, epsilon=0.0)
    numpy.testing.assert_allclose(relative, math.sqrt(3) / 2 * numpy.array([1, -1, -1, 1, 0]))
    numpy.testing.assert_allclose(
        oracles.leave_one_out(rewards, valid, groups), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0], rtol=1e-15
    )


def test_clipped_loss_by_hand():
    """Ratio against [0.8, 1.2], and dual clip 3: the objective is min(rho A, clip(rho) A), not below 3 A for A < 0."""
    figures = [oracles.clipped_loss(ratio, 1.0, 0.2, 0.2, 3.0) for ratio in (0.5, 1.0, 1.5, 4.0)]
    assert figures == [(-0.5, -1, False, False), (-1, -1, False, False), (-1.2, 0, False, True), (-1.2, 0, False, True)]
    figures = [oracles.clipped_loss(ratio, -2.0, 0.2, 0.2, 3.0) for ratio in (0.5, 1.0, 1.5, 4.0)]
    assert figures == [(1.6, 0, True, False), (2, 2, False, False), (3, 2, False, False), (6, 0, False, True)]
    assert oracles.clipped_loss(4.0, -2.0, 0.2, 0.2) == (8, 2, False, False)


def test_value_loss_by_hand():
    """Old value 0, clip 0.2, target 1: at 0.5 the clipped error 0.8 counts; at -0.5 the free one, 1.5, is larger."""
    assert oracles.clipped_value_loss(0.5, 0.0, 1.0, 0.2) == (pytest.approx(0.32), 0.0, True)
    assert oracles.clipped_value_loss(-0.5, 0.0, 1.0, 0.2) == (1.125, -1.5, False)
    assert oracles.clipped_value_loss(0.5, 0.0, 1.0, None) == (0.125, -0.5, False)
