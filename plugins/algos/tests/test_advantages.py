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
    """Batches of the tokens that train, and the padded arrays that the oracle reads."""
    for seed in SEEDS:
        rows = random_batch(seed, dtype).batch
        yield f"seed {seed}", rows.tokens, arrays(rows)


def trained(grid, data):
    """What the oracle says of the tokens that train."""
    return grid[data.response_mask]


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
        plain = token_rewards(batch.rewards, batch.num_tokens)
        assert_agrees(plain, trained(oracles.token_rewards(data.rewards, data.response_mask), data), dtype, what)
        kl = batch.old_logprobs - batch.ref_logprobs
        differences = numpy.where(data.response_mask, data.old_logprobs - data.ref_logprobs, 0.0)
        expected = trained(oracles.token_rewards(data.rewards, data.response_mask, differences, 0.3), data)
        assert_agrees(token_rewards(batch.rewards, batch.num_tokens, kl, 0.3), expected, dtype, what)


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.97, 0.0), (0.0, 1.0), (1.0, "rows")]
)
def test_generalized_advantages(dtype, gamma, lam):
    for what, batch, data in batches(dtype):
        lam_of = torch.linspace(0, 1, batch.num_sequences, dtype=dtype) if lam == "rows" else lam
        actual = generalized_advantages(batch.ref_logprobs, batch.values, batch.num_tokens, gamma, lam_of)
        lam_of = lam_of.double().numpy() if lam == "rows" else lam
        inputs = data.ref_logprobs, data.values, data.response_mask
        assert_agrees(actual, trained(oracles.generalized_advantages(*inputs, gamma, lam_of), data), dtype, what)


@pytest.mark.parametrize("lengths", [[4099, 0, 1, 700], [33, 32, 31, 64, 65], [0, 0], []], ids=str)
def test_generalized_advantages_of_long_rows(lengths):
    """Rows that are doubled many times, beside short ones: a sum must end with its row."""
    random = numpy.random.default_rng(0)
    rewards, values = random.normal(size=(2, sum(lengths)))
    found = generalized_advantages(
        torch.from_numpy(rewards), torch.from_numpy(values), torch.tensor(lengths, dtype=torch.int64), 0.999, 0.998
    )
    expected, start = [], 0
    for length in lengths:
        following = advantage = 0.0
        of_row = []
        for t in range(start + length - 1, start - 1, -1):
            advantage = rewards[t] + 0.999 * following - values[t] + 0.999 * 0.998 * advantage
            following = values[t]
            of_row.append(advantage)
        expected += of_row[::-1]
        start += length
    numpy.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-10)


def test_a_value_that_is_no_number_stays_in_its_row():
    values = torch.tensor([1.0, 2.0, math.nan, 4.0, 5.0])
    found = generalized_advantages(torch.zeros(5), values, torch.tensor([2, 2, 1]), 1.0, 0.9)
    assert found.isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns(dtype, gamma):
    for what, batch, data in batches(dtype):
        expected = trained(oracles.discounted_returns(data.values, data.response_mask, gamma), data)
        assert_agrees(discounted_returns(batch.values, batch.num_tokens, gamma), expected, dtype, what)


def test_whiten(dtype):
    for what, batch, data in batches(dtype):
        assert_agrees(whiten(batch.values), trained(oracles.whiten(data.values, data.response_mask), data), dtype, what)


def test_explained_variance(dtype):
    for what, batch, data in batches(dtype):
        expected = oracles.explained_variance(data.values, data.ref_logprobs, data.response_mask)
        assert_agrees(explained_variance(batch.values, batch.ref_logprobs), expected, dtype, what, at_least=1.0)


def test_explained_variance_of_a_perfect_and_of_a_useless_critic():
    returns = torch.tensor([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(returns + 3, returns) == pytest.approx(1)  # a bias is not variance
    assert explained_variance(torch.zeros(3), returns) == pytest.approx(0)
    assert explained_variance(-returns, returns) == pytest.approx(-3)


@pytest.mark.parametrize("count", [1, 3, 7, 10])
def test_the_same_everywhere_is_no_variance(dtype, count):
    """0.1 has no exact mean of 3 in binary: what rounding leaves must not be divided by itself."""
    same = torch.full((count,), 0.1, dtype=dtype)
    assert whiten(same).abs().max() == 0
    assert explained_variance(torch.arange(count, dtype=dtype), same) == 0
    rows = same, torch.ones(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64)
    assert group_relative(*rows).abs().max() == 0
    assert leave_one_out(*rows).abs().max() <= 1e-7
    assert degenerate_share(*rows) == 1


@pytest.mark.parametrize("alpha", [0.05, 0.3, 1.0, 50.0])
def test_length_adaptive_lambda(alpha):
    for what, batch, data in batches(torch.float64):
        actual = length_adaptive_lambda(batch.num_tokens, alpha)
        assert ((actual >= 0) & (actual <= 1)).all(), what
        some = data.response_mask.any(axis=1)  # without a token any lambda will do
        expected = oracles.length_adaptive_lambda(data.response_mask, alpha)[some]
        assert actual[some].tolist() == pytest.approx(expected, rel=1e-6), what


def test_lambda_of_long_completions():
    """The paper's alpha 0.05: 0 up to 20 tokens, 1 - 20 / l beyond."""
    lengths = torch.tensor([5, 20, 40, 1000])
    assert length_adaptive_lambda(lengths, 0.05).tolist() == pytest.approx([0, 0, 0.5, 0.98])


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
    batch = random_batch(seed % 997).batch.tokens
    lengths, rewards = batch.num_tokens, batch.ref_logprobs
    expected = discounted_returns(rewards, lengths, gamma) - batch.values
    torch.testing.assert_close(generalized_advantages(rewards, batch.values, lengths, gamma, 1.0), expected)
    returns = generalized_advantages(rewards, batch.values, lengths, 1.0, 1.0) + batch.values
    for of_row, row in zip(returns.split(lengths.tolist()), rewards.split(lengths.tolist()), strict=True):
        assert of_row[:1].tolist() == pytest.approx([row.sum().item()] * len(of_row[:1]))


@many
@given(st.integers(0, 10**6))
def test_whitened_values_have_mean_0_and_std_1(seed):
    white = whiten(random_batch(seed % 997).batch.tokens.values)
    if len(white) > 1:
        assert white.mean().abs() < 1e-9
        assert white.std() == pytest.approx(1, abs=1e-6)
    else:
        assert not white.any()
