"""The pure functions of ``advantages`` against the oracle, over random batches, and what must hold for any input."""

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
from rlplug_algos.advantages import (
    degenerate_share,
    discounted_returns,
    explained_variance,
    generalized_advantages,
    group_relative,
    leave_one_out,
    length_adaptive_lambda,
    token_rewards,
    whiten,
)

DTYPES = [torch.float64, torch.float32]
many = settings(max_examples=60, derandomize=True)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def batches(dtype):
    for seed in SEEDS:
        batch = random_batch(seed, dtype).batch
        yield f"seed {seed}", batch, arrays(batch)


def per_row(batch):
    return batch.rewards, batch.reward_valid, batch.group_index


@pytest.mark.parametrize("options", [{}, {"normalize_std": False}, {"epsilon": 0.3}], ids=str)
def test_group_relative(dtype, options):
    for what, batch, data in batches(dtype):
        expected = oracles.group_relative(data.rewards, data.reward_valid, data.group_index, **options)
        assert_agrees(group_relative(*per_row(batch), **options), expected, dtype, what, at_least=1.0)


def test_leave_one_out(dtype):
    for what, batch, data in batches(dtype):
        expected = oracles.leave_one_out(data.rewards, data.reward_valid, data.group_index)
        assert_agrees(leave_one_out(*per_row(batch)), expected, dtype, what, at_least=1.0)


def test_degenerate_share(dtype):
    for what, batch, data in batches(dtype):
        expected = oracles.degenerate_share(data.rewards, data.reward_valid, data.group_index)
        assert degenerate_share(*per_row(batch)) == pytest.approx(expected), what


def test_token_rewards(dtype):
    for what, batch, data in batches(dtype):
        plain = token_rewards(batch.rewards, batch.response_mask)
        assert_agrees(plain, oracles.token_rewards(data.rewards, data.response_mask), dtype, what)
        kl = torch.where(batch.response_mask, batch.old_logprobs - batch.ref_logprobs, math.nan)
        expected = oracles.token_rewards(data.rewards, data.response_mask, kl.double().numpy(), 0.3)
        assert_agrees(token_rewards(batch.rewards, batch.response_mask, kl, 0.3), expected, dtype, what)


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.97, 0.0), (0.0, 1.0), (1.0, "rows")]
)
def test_generalized_advantages(dtype, gamma, lam):
    for what, batch, data in batches(dtype):
        lam_of = torch.linspace(0, 1, batch.num_sequences, dtype=dtype) if lam == "rows" else lam
        rewards = torch.where(batch.response_mask, batch.ref_logprobs, math.nan)
        values = torch.where(batch.response_mask, batch.values, math.inf)
        actual = generalized_advantages(rewards, values, batch.response_mask, gamma, lam_of)
        lam_of = lam_of.double().numpy() if lam == "rows" else lam
        inputs = data.ref_logprobs, data.values, data.response_mask
        assert_agrees(actual, oracles.generalized_advantages(*inputs, gamma, lam_of), dtype, what)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns(dtype, gamma):
    for what, batch, data in batches(dtype):
        expected = oracles.discounted_returns(data.values, data.response_mask, gamma)
        assert_agrees(discounted_returns(batch.values, batch.response_mask, gamma), expected, dtype, what)


def test_whiten(dtype):
    for what, batch, data in batches(dtype):
        values = torch.where(batch.response_mask, batch.values, math.nan)
        expected = oracles.whiten(data.values, data.response_mask)
        assert_agrees(whiten(values, batch.response_mask), expected, dtype, what)


def test_explained_variance(dtype):
    for what, batch, data in batches(dtype):
        values, returns = (torch.where(batch.response_mask, x, math.nan) for x in (batch.values, batch.ref_logprobs))
        expected = oracles.explained_variance(data.values, data.ref_logprobs, data.response_mask)
        actual = explained_variance(values, returns, batch.response_mask)
        assert_agrees(actual, expected, dtype, what, at_least=1.0)


def test_explained_variance_of_a_perfect_and_of_a_useless_critic():
    returns, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(returns + 3, returns, mask) == pytest.approx(1)  # a bias is not variance
    assert explained_variance(torch.zeros(1, 3), returns, mask) == pytest.approx(0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)


@pytest.mark.parametrize("count", [1, 3, 7, 10])
def test_the_same_everywhere_is_no_variance(dtype, count):
    """0.1 has no exact mean of 3 in binary: what rounding leaves must not be divided by itself."""
    mask = torch.ones(1, count, dtype=torch.bool)
    same = torch.full((1, count), 0.1, dtype=dtype)
    assert whiten(same, mask).abs().max() == 0
    assert explained_variance(torch.arange(count, dtype=dtype)[None], same, mask) == 0
    rows = same[0], mask[0], torch.zeros(count, dtype=torch.int64)
    assert group_relative(*rows).abs().max() == 0
    assert leave_one_out(*rows).abs().max() <= 1e-7
    assert degenerate_share(*rows) == 1


@pytest.mark.parametrize("alpha", [0.05, 0.3, 1.0, 50.0])
def test_length_adaptive_lambda(alpha):
    for what, batch, data in batches(torch.float64):
        actual = length_adaptive_lambda(batch.response_mask, alpha)
        assert ((actual >= 0) & (actual <= 1)).all(), what
        some = data.response_mask.any(axis=1)  # without a token any lambda will do
        expected = oracles.length_adaptive_lambda(data.response_mask, alpha)[some]
        assert actual[some].tolist() == pytest.approx(expected, rel=1e-6), what


def test_lambda_of_long_completions():
    """The paper's alpha 0.05: 0 up to 20 tokens, 1 - 20 / l beyond."""
    mask = torch.arange(1000) < torch.tensor([[5], [20], [40], [1000]])
    assert length_adaptive_lambda(mask, 0.05).tolist() == pytest.approx([0, 0, 0.5, 0.98])


reward = st.sampled_from([0.0, 0.1, 1.0, -2.5]) | st.floats(-10, 10, width=32)
rows = st.lists(st.tuples(reward, st.booleans(), st.integers(0, 3)), min_size=1, max_size=12)


def columns(rows):
    rewards, valid, groups = zip(*rows, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(valid), torch.tensor(groups)


@many
@given(rows, st.floats(0.01, 100), st.floats(-50, 50))
def test_scaling_and_shifting_rewards(rows, scale, shift):
    rewards, valid, groups = columns(rows)
    rewards = (rewards * 64).round() / 64  # so that shifting does not merge rewards or tell equal ones apart
    moved = rewards * scale + shift
    before = group_relative(rewards, valid, groups, epsilon=0.0)
    torch.testing.assert_close(group_relative(moved, valid, groups, epsilon=0.0), before, rtol=1e-6, atol=1e-6)
    centred = group_relative(rewards, valid, groups, normalize_std=False)
    after = group_relative(moved, valid, groups, normalize_std=False)
    torch.testing.assert_close(after, centred * scale, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(leave_one_out(moved, valid, groups), leave_one_out(rewards, valid, groups) * scale)


@many
@given(rows)
def test_leave_one_out_is_the_centred_reward_by_g_over_g_minus_1(rows):
    rewards, valid, groups = columns(rows)
    size = torch.stack([((groups == g) & valid).sum() for g in groups]).double()
    factor = torch.where(size > 1, size / (size - 1).clamp(min=1), 0.0)
    centred = group_relative(rewards, valid, groups, normalize_std=False)
    torch.testing.assert_close(leave_one_out(rewards, valid, groups), centred * factor, rtol=1e-9, atol=1e-9)


@many
@given(rows)
def test_advantages_of_a_group_add_up_to_nothing(rows):
    rewards, valid, groups = columns(rows)
    for advantages in (group_relative(rewards, valid, groups), leave_one_out(rewards, valid, groups)):
        assert not advantages[~valid].any()
        for group in groups.unique():
            assert advantages[groups == group].sum().abs() < 1e-9


@many
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_with_lambda_1_advantages_are_returns_minus_values(seed, gamma):
    batch = random_batch(seed % 997).batch
    mask, rewards = batch.response_mask, batch.ref_logprobs
    expected = torch.where(mask, discounted_returns(rewards, mask, gamma) - batch.values, 0.0)
    torch.testing.assert_close(generalized_advantages(rewards, batch.values, mask, gamma, 1.0), expected)
    undiscounted = numpy.array([row[trains].sum().item() for row, trains in zip(rewards, mask, strict=True)])
    returns = generalized_advantages(rewards, batch.values, mask, 1.0, 1.0) + batch.values
    for row, total in enumerate(undiscounted):
        first = mask[row].nonzero()[:1, 0]
        assert returns[row, first].tolist() == pytest.approx([total] * len(first))


@many
@given(st.integers(0, 10**6))
def test_whitened_values_have_mean_0_and_std_1(seed):
    batch = random_batch(seed % 997).batch
    white = whiten(batch.values, batch.response_mask)[batch.response_mask]
    if len(white) > 1:
        assert white.mean().abs() < 1e-9
        assert white.std() == pytest.approx(1, abs=1e-6)
    else:
        assert not white.any()
