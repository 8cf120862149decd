"""KL estimates, their gradients in expectation (enumerated, not sampled), and the adaptive coefficient."""

from __future__ import annotations

import math

import numpy
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_algorithms import arrays
from random_batches import SEEDS, assert_agrees, random_batch
from rlplug_algos.kl import AdaptiveKL, kl_estimate, kl_penalty
from rlplug_algos.policy_losses import MAX_LOG_RATIO

ESTIMATORS = ["k1", "k2", "k3", "k3_unweighted"]
POLICIES = [
    # logits of the policy, of the one that sampled, and of the reference
    ([0.3, -1.0, 2.0, 0.0], [0.5, -0.5, 1.0, 0.2], [0.0, 0.7, -0.3, 0.1]),
    ([1.5, 1.4, -2.0, 0.2], [1.0, 2.0, -1.0, 0.0], [2.0, -1.0, 0.5, 0.5]),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_and_gradients(estimator, dtype):
    for seed in SEEDS:
        draw = random_batch(seed, dtype)
        data, now = arrays(draw.batch), draw.logprobs.detach().double().numpy()
        estimate = kl_estimate(draw.logprobs, draw.batch.ref_logprobs, estimator)
        penalty = kl_penalty(draw.logprobs, draw.batch.old_logprobs, draw.batch.ref_logprobs, estimator)
        (gradient,) = torch.autograd.grad(penalty.sum(), draw.logprobs)
        every = [[*zip(*rows, strict=True)] for rows in zip(now, data.old_logprobs, data.ref_logprobs, strict=True)]
        values = [[oracles.kl_value(new, ref, estimator) for new, _, ref in row] for row in every]
        expected = [[oracles.kl_penalty(*token, estimator) for token in row] for row in every]
        assert_agrees(estimate, values, dtype, f"seed {seed}")
        assert_agrees(penalty, [[value for value, _ in row] for row in expected], dtype, f"seed {seed}")
        assert_agrees(gradient, [[slope for _, slope in row] for row in expected], dtype, f"seed {seed}")


GRID = numpy.concatenate([numpy.arange(-100, 20.01, 0.1), *(sign * numpy.logspace(-12, 0, 49) for sign in (-1, 1))])
"""Log ratios of policy and reference, also next to 0, where exp(-d) - 1 is small."""


@pytest.mark.parametrize("old_log_ratio", [0.0, -1.5, 3.0, 19.0, 25.0, -25.0])
@pytest.mark.parametrize(
    ("estimator", "k3_max"), [*((each, None) for each in ESTIMATORS), ("k3", 10.0), ("k3_unweighted", 10.0)]
)
def test_float32_gradients_over_all_log_ratios(estimator, k3_max, old_log_ratio):
    """Of each token to float32's accuracy: autograd's sum of terms that cancel is off by more than the gradient."""
    new = torch.tensor(GRID, dtype=torch.float32, requires_grad=True)
    old = new.detach() - old_log_ratio
    penalty = kl_penalty(new, old, torch.zeros_like(new), estimator, k3_max)
    (gradient,) = torch.autograd.grad(penalty.sum(), new)
    arguments = zip(new.detach().double().tolist(), old.double().tolist(), strict=True)
    slopes = [oracles.kl_penalty(d, before, 0.0, estimator, k3_max, MAX_LOG_RATIO)[1] for d, before in arguments]
    expected = torch.tensor(slopes, dtype=torch.float64)
    fits = penalty.isfinite()  # exp(88.8) is no float32 number: such a value stops the run
    assert fits.float().mean() > 0.7
    # nats are rounded to 4e-6 at 100, and so is exp of them, relatively
    torch.testing.assert_close(gradient[fits].double(), expected[fits], rtol=1e-5, atol=0)


def expected_gradient(logits, old_logits, ref_logits, estimator):
    """Gradient in the policy's logits of the mean penalty over every token that the old policy can sample."""
    logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    old, ref = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in (old_logits, ref_logits))
    penalty = kl_penalty(logits.log_softmax(0)[:, None], old[:, None], ref[:, None], estimator)
    (gradient,) = torch.autograd.grad((old.exp()[:, None] * penalty).sum(), logits)
    return gradient


def reverse_gradient(logits, ref_logits):
    """d KL(pi || ref) / d z_j = pi_j (log(pi_j / ref_j) - KL), for a softmax over logits z."""
    pi, ref = (torch.tensor(x, dtype=torch.float64).softmax(0) for x in (logits, ref_logits))
    log_ratio = pi.log() - ref.log()
    return pi * (log_ratio - (pi * log_ratio).sum())


def forward_gradient(logits, ref_logits):
    """d KL(ref || pi) / d z_j = pi_j - ref_j."""
    pi, ref = (torch.tensor(x, dtype=torch.float64).softmax(0) for x in (logits, ref_logits))
    return pi - ref


@pytest.mark.parametrize(("logits", "old", "ref"), POLICIES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_on_policy_the_gradient_is_that_of_the_reverse_kl(estimator, logits, old, ref):
    gradient = expected_gradient(logits, logits, ref, estimator)
    torch.testing.assert_close(gradient, reverse_gradient(logits, ref), rtol=1e-12, atol=1e-14)
    assert gradient.abs().max() > 0.05


@pytest.mark.parametrize(("logits", "old", "ref"), POLICIES)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_with_the_ratio_it_is_so_off_policy_too(estimator, logits, old, ref):
    gradient = expected_gradient(logits, old, ref, estimator)
    torch.testing.assert_close(gradient, reverse_gradient(logits, ref), rtol=1e-12, atol=1e-14)
    # k2 has no ratio, and is right on-policy alone
    assert (expected_gradient(logits, old, ref, "k2") - reverse_gradient(logits, ref)).abs().max() > 0.01


@pytest.mark.parametrize(("logits", "old", "ref"), POLICIES)
def test_unweighted_k3_is_the_forward_kl(logits, old, ref):
    """E_pi[(1 - ref / pi) grad log pi] = -sum_x ref grad log pi = grad KL(ref || pi): another direction."""
    gradient = expected_gradient(logits, logits, ref, "k3_unweighted")
    torch.testing.assert_close(gradient, forward_gradient(logits, ref), rtol=1e-12, atol=1e-14)
    assert (gradient - reverse_gradient(logits, ref)).abs().max() > 0.05


@pytest.mark.parametrize(("logits", "old", "ref"), POLICIES)
@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_unweighted"])
def test_the_mean_estimate_is_the_kl(estimator, logits, old, ref):
    pi, ref = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in (logits, ref))
    exact = (pi.exp() * (pi - ref)).sum()
    torch.testing.assert_close((pi.exp() * kl_estimate(pi[:, None], ref[:, None], estimator)[:, 0]).sum(), exact)
    assert exact > 0.1


@settings(max_examples=200, derandomize=True)
@given(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32) | st.floats(-(2**-10), 2**-10, width=32))
def test_k3_is_never_negative(logprob, difference):
    """Also in float32, where the terms of a small difference d cancel down to d^2 / 2."""
    for dtype in (torch.float32, torch.float64):
        new = torch.tensor([[logprob]], dtype=dtype)
        k3 = kl_estimate(new, new + difference, "k3").item()
        assert k3 >= 0
        d = (new + difference - new).double().item()
        # expm1(d) - d is exact to the rounding of d, which is what d^2 / 2 is lost in below 1e-7
        assert k3 == pytest.approx(math.expm1(d) - d, rel=1e-3, abs=2 * torch.finfo(dtype).eps * abs(d))


def test_adaptive_coefficient_by_hand():
    """Target 0.05 nats, horizon 10000, 256 completions: errors +0.1, clipped +0.2, clipped -0.2, 0."""
    control = AdaptiveKL(coefficient=0.1, target=0.05, horizon=10_000)
    figures = []
    for kl in (0.055, 3.0, 0.0, 0.05):
        control.update(kl, 256)
        figures.append(control.coefficient)
    first = 0.1 * 1.00256
    second = first * 1.00512
    third = second * 0.99488
    assert figures == pytest.approx([first, second, third, third], rel=1e-9)


def test_adaptive_coefficient_finds_its_target():
    """A policy whose KL is 0.01 / coefficient settles where that is the target."""
    control = AdaptiveKL(coefficient=5.0, target=0.1, horizon=1000)
    for _ in range(400):
        control.update(0.01 / control.coefficient, 128)
    assert control.coefficient == pytest.approx(0.1, rel=1e-3)
