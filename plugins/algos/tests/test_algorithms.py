"""Each algorithm from end to end, with several configurations, against the oracle of its paper."""

from __future__ import annotations

import numpy
import oracle_algorithms
import pytest
import torch
from algorithm_cases import (
    CASES,
    ONE_EACH,
    PAPERS,
    WITH_CRITIC,
    advantages_of,
    loss_of,
    oracle_advantages,
    ready,
    sampled,
    value_loss_of,
)
from random_batches import MAX_NEW_TOKENS, SEEDS, assert_agrees, denominators_of, random_batch
from rlplug_algos.ppo import PPO

from rlplug.interfaces import Needs

DTYPES = [torch.float64, pytest.param(torch.float32, marks=pytest.mark.nightly)]


def gradient_of(output, leaf):
    (gradient,) = torch.autograd.grad(output, leaf, allow_unused=True, retain_graph=True)
    return torch.zeros_like(leaf) if gradient is None else gradient


def check_metrics(actual, expected, dtype, what):
    assert set(actual) == set(expected), what
    for name, value in expected.items():
        # a quotient of two variances, of which the lower one may be mostly rounding
        size = 10 * max(1.0, abs(value)) if name == "critic/explained_variance" else 1.0
        assert_agrees(float(actual[name]), value, dtype, f"{what} {name}", at_least=size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_advantages(case, dtype):
    for seed in SEEDS:
        draw, what = random_batch(seed, dtype), f"seed {seed}"
        algorithm, batch = sampled(case, draw)
        actual, expected = advantages_of(algorithm, batch), oracle_advantages(case, draw)
        # a lambda made of lengths is float32 in any case
        accuracy = torch.float32 if "alpha" in case.oracle else dtype
        assert actual.advantages.dtype == dtype
        assert_agrees(actual.advantages.to(accuracy), expected.advantages, accuracy, what)
        assert (actual.response_mask.numpy() == expected.response_mask).all(), what
        assert (actual.returns is None) == (expected.returns is None)
        if expected.returns is not None:
            assert_agrees(actual.returns, expected.returns, dtype, what)
        check_metrics(actual.metrics, expected.metrics, torch.float32, what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss(case, dtype):
    for seed in SEEDS:
        draw, what = random_batch(seed, dtype), f"seed {seed}"
        algorithm, batch = ready(case, draw)
        denominators = denominators_of(batch)
        actual = loss_of(algorithm, batch, draw.logprobs, draw.entropy, denominators)
        assert actual.loss.requires_grad, what  # with nothing to train on, too: the loop calls backward
        now = [x.detach().double().numpy() for x in (draw.logprobs, draw.entropy)]
        data = oracle_algorithms.arrays(batch)
        expected = oracle_algorithms.loss(data, *now, case.oracle, denominators, MAX_NEW_TOKENS)
        assert_agrees(actual.loss, expected.loss, dtype, what, at_least=1.0)
        assert_agrees(gradient_of(actual.loss, draw.logprobs), expected.gradient, dtype, what)
        assert_agrees(gradient_of(actual.loss, draw.entropy), expected.entropy_gradient, dtype, what)
        check_metrics(actual.metrics, expected.metrics, torch.float32, what)
        extremes = [actual.minima["policy/ratio_min"].item(), actual.maxima["policy/ratio_max"].item()]
        assert extremes == pytest.approx(expected.extremes, rel=1e-5), what
        assert not any(x.requires_grad for x in [*actual.metrics.values(), *actual.maxima.values()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", WITH_CRITIC, ids=str)
def test_value_loss(case, dtype):
    for seed in SEEDS:
        draw, what = random_batch(seed, dtype), f"seed {seed}"
        algorithm, batch = ready(case, draw)
        denominators = denominators_of(batch)
        actual = value_loss_of(algorithm, batch, draw.values, denominators)
        data, now = oracle_algorithms.arrays(batch), draw.values.detach().double().numpy()
        loss, gradient, clipped = oracle_algorithms.value_loss(data, now, case.oracle["value_clip"], denominators)
        assert_agrees(actual.loss, loss, dtype, what)
        assert_agrees(gradient_of(actual.loss, draw.values), gradient, dtype, what)
        check_metrics(actual.metrics, {"critic/clip_fraction": clipped}, torch.float32, what)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_reward_that_failed_never_counts(case):
    """NaN where ``reward_valid`` is false leaves no trace in an advantage or a metric."""
    for seed in SEEDS[:30]:
        draw, what = random_batch(seed), f"seed {seed}"
        algorithm, batch = sampled(case, draw)
        dirty = batch.replace(rewards=torch.where(batch.reward_valid, batch.rewards, torch.nan))
        clean, soiled = advantages_of(algorithm, batch), advantages_of(algorithm, dirty)
        torch.testing.assert_close(soiled.advantages, clean.advantages, rtol=0, atol=0)
        assert soiled.metrics == clean.metrics, what


def test_the_random_batches_hold_every_odd_case():
    """What the loops over seeds above rely on."""
    batches = [random_batch(seed).batch for seed in SEEDS]
    tokens = [batch.response_mask.sum(dim=1) for batch in batches]
    assert sum(not count.any() for count in tokens) >= 2
    assert sum((~batch.reward_valid).any() for batch in batches) > 20
    assert sum((batch.reward_valid & (count == 0)).any() for batch, count in zip(batches, tokens, strict=True)) > 20
    assert sum((count == 1).any() for count in tokens) > 20
    assert sum((count > MAX_NEW_TOKENS).any() for count in tokens) > 10
    edges = [batch.response_mask.int().diff(dim=1).abs().sum(dim=1) for batch in batches]
    assert sum((count > 2).any() for count in edges) > 15  # a response in two pieces
    shares = [oracle_advantages(CASES[0], random_batch(seed)).metrics["advantages/degenerate_groups"] for seed in SEEDS]
    assert 2 <= sum(share == 1 for share in shares) < sum(share > 0 for share in shares) < len(SEEDS)
    sizes = [batch.group_index.unique(return_counts=True)[1] for batch in batches]
    assert sum((count == 1).any() for count in sizes) > 10
    for case in ONE_EACH:
        high = low = 0
        for seed in SEEDS:
            batch = ready(case, random_batch(seed))[1]
            data, now = oracle_algorithms.arrays(batch), random_batch(seed).logprobs.detach().numpy()
            expected = oracle_algorithms.loss(data, now, now, case.oracle, denominators_of(batch), MAX_NEW_TOKENS)
            high += expected.metrics["policy/clip_fraction_high"] > 0.05
            low += expected.metrics["policy/clip_fraction_low"] > 0.05
        assert case.oracle.get("ratio_range") or (high > 5 and low > 5), case
    assert {type(case.make()).__name__ for case in CASES} == set(PAPERS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_needs(case):
    oracle = case.oracle
    in_reward = bool(oracle.get("token_kl") or oracle.get("sequence_kl"))
    assert case.make().needs == Needs(
        groups=oracle["advantages"] in ("group", "leave_one_out", "group_whitened") or "PFPPO" in str(case),
        old_logprobs=in_reward,
        reference_policy=in_reward or "kl" in oracle,
        rollout_logprobs="correction" in oracle,
        critic=oracle["advantages"] == "critic",
        entropy_gradient="entropy" in oracle,
    )


def test_the_critics_targets_do_not_depend_on_whitening():
    draw = random_batch(1)
    returns = []
    for whiten in (True, False):
        algorithm = PPO(whiten_advantages=whiten)
        returns.append(advantages_of(algorithm, draw.batch).returns)
    assert torch.equal(*returns)
    assert numpy.abs(returns[0].numpy()).max() > 0.1
