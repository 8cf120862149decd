"""Ratios, clipped losses, corrections and aggregation against the oracle, and an example worked out by hand."""

from __future__ import annotations

import math

import numpy
import oracles
import pytest
import torch
from oracle_algorithms import arrays
from random_batches import MAX_NEW_TOKENS, SEEDS, assert_agrees, denominators_of, random_batch, with_garbage
from rlplug_algos.aggregation import aggregate
from rlplug_algos.corrections import Correction, correction_weights
from rlplug_algos.policy_losses import cispo_loss, clipped_loss, sequence_ratio, token_ratio
from rlplug_algos.value_losses import clipped_value_loss

from rlplug.interfaces import Denominators


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def dtype(request):
    return request.param


def draws(dtype):
    for seed in SEEDS:
        draw = random_batch(seed, dtype)
        yield f"seed {seed}", draw, arrays(draw.batch), draw.logprobs.detach().double().numpy()


def masked(tensor, mask):
    return torch.where(mask, tensor, 0.0)


@pytest.mark.parametrize("kind", ["token", "mean", "sum"])
def test_ratios(dtype, kind):
    """Value, and the gradient of a weighted sum: a sequence's ratio has one to each of its tokens."""
    for what, draw, data, now in draws(dtype):
        batch, mask = draw.batch, draw.batch.response_mask
        if kind == "token":
            ratio = token_ratio(draw.logprobs, batch.old_logprobs)
        else:
            ratio = sequence_ratio(draw.logprobs, batch.old_logprobs, mask, length_normalized=kind == "mean")
        expected = numpy.exp(oracles.log_ratios(now, data.old_logprobs, data.response_mask, kind))
        assert_agrees(masked(ratio, mask), numpy.where(data.response_mask, expected, 0.0), dtype, what)
        (gradient,) = torch.autograd.grad(masked(ratio * batch.values, mask).sum(), draw.logprobs)
        moved = numpy.zeros(now.shape)
        for i in range(len(now)):
            tokens = oracles.tokens_of(data.response_mask, i)
            for t in tokens:
                for s in tokens:
                    slope = oracles.log_ratio_derivative(data.response_mask, i, t, s, kind)
                    moved[i, s] += data.values[i, t] * expected[i, t] * slope
        assert_agrees(gradient, moved, dtype, what, at_least=1.0)


@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.1, 0.3), (3e-4, 4e-4), (0.2, 0.28, 1.3), (0.2, 0.2, 3.0)], ids=str)
def test_clipped_loss(dtype, clip):
    seen = numpy.zeros(2)
    for what, draw, _, _ in draws(dtype):
        ratio = draw.batch.values.exp().requires_grad_()
        advantages = torch.where(draw.batch.truncated[:, None], 0.0, draw.batch.ref_logprobs + 1)
        term = clipped_loss(ratio, advantages, *clip)
        (gradient,) = torch.autograd.grad(term.loss.sum(), ratio)
        every = zip(ratio.detach().double().flatten(), advantages.double().flatten(), strict=True)
        loss, slope, low, high = zip(*[oracles.clipped_loss(r.item(), a.item(), *clip) for r, a in every], strict=True)
        assert_agrees(term.loss.flatten(), loss, dtype, what)
        assert_agrees(gradient.flatten(), slope, dtype, what)
        assert term.clipped_low.flatten().tolist() == list(low), what
        assert term.clipped_high.flatten().tolist() == list(high), what
        assert torch.equal(term.ratio, ratio)
        seen += sum(low), sum(high)
    assert seen.min() > 100


@pytest.mark.parametrize(("low", "high"), [(0.0, 5.0), (0.8, 1.2)])
def test_cispo_loss(dtype, low, high):
    """The gradient is that of weighted log-likelihood: the weight is bounded, and no token's gradient stops."""
    for what, draw, data, now in draws(dtype):
        ratio = token_ratio(draw.logprobs, draw.batch.old_logprobs)
        term = cispo_loss(draw.logprobs, ratio, draw.batch.values, low, high)
        (gradient,) = torch.autograd.grad(term.loss.sum(), draw.logprobs)
        weight = numpy.array([[min(max(math.exp(d), low), high) for d in row] for row in now - data.old_logprobs])
        assert_agrees(term.loss, -weight * data.values * now, dtype, what)
        assert_agrees(gradient, -weight * data.values, dtype, what)


@pytest.mark.parametrize("clip", [None, 0.2, 0.05])
def test_clipped_value_loss(dtype, clip):
    for what, draw, _, _ in draws(dtype):
        now, returns = draw.values, draw.batch.ref_logprobs
        loss, clipped = clipped_value_loss(now, draw.batch.values, returns, clip)
        (gradient,) = torch.autograd.grad(loss.sum(), now)
        every = zip(*(x.double().detach().flatten().tolist() for x in (now, draw.batch.values, returns)), strict=True)
        expected, slope, stopped = zip(*[oracles.clipped_value_loss(*x, clip) for x in every], strict=True)
        assert_agrees(loss.flatten(), expected, dtype, what)
        assert_agrees(gradient.flatten(), slope, dtype, what)
        assert clipped.flatten().tolist() == list(stopped), what


CORRECTIONS = [
    {},
    {"cap": 1.2, "floor": 0.8},
    {"mode": "mask", "cap": 1.3},
    {"mode": "mask", "cap": 1.5, "floor": 0.5},
    {"level": "sequence"},
    {"level": "sequence", "cap": 1.1, "floor": 0.9},
    {"level": "sequence", "mode": "mask", "cap": 3.0, "floor": 0.3},
]


@pytest.mark.parametrize("options", CORRECTIONS, ids=str)
def test_correction_weights(dtype, options):
    limited = 0
    for what, draw, data, _ in draws(dtype):
        mask = draw.batch.response_mask
        old, rollout = (with_garbage(x, mask) for x in (draw.batch.old_logprobs, draw.batch.rollout_logprobs))
        weights = correction_weights(old.requires_grad_(), rollout, mask, Correction(**options))
        expected, changed = oracles.correction_weights(
            data.old_logprobs, data.rollout_logprobs, data.response_mask, **options
        )
        assert_agrees(masked(weights, mask), expected, dtype, what)
        assert torch.isfinite(weights).all(), what
        assert not weights.requires_grad
        limited += changed.sum()
    assert limited > 50


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_aggregate(dtype, aggregation):
    for what, draw, data, _ in draws(dtype):
        mask, denominators = draw.batch.response_mask, denominators_of(draw.batch)
        per_token = with_garbage(draw.batch.values.clone().requires_grad_(), mask)
        total = aggregate(per_token, mask, denominators, aggregation, MAX_NEW_TOKENS)
        (gradient,) = torch.autograd.grad(total, per_token)
        counts = max(denominators.num_tokens, 1), max(denominators.num_sequences, 1)
        weights = oracles.token_weights(data.response_mask, *counts, aggregation, MAX_NEW_TOKENS)
        assert_agrees(total, (weights * data.values).sum(), dtype, what, at_least=1.0)
        assert_agrees(gradient, weights, dtype, what)


def test_aggregate_divides_by_the_mini_batch():
    """Values 1, 2, 6 in rows of 1 and 2 tokens; of a mini-batch with 10 tokens, 4 sequences, 5 at most."""
    per_token = torch.tensor([[9.0, 1.0, 9.0], [9.0, 2.0, 6.0]])
    mask = torch.tensor([[False, True, False], [False, True, True]])
    figures = [aggregate(per_token, mask, Denominators(10, 4), kind, 5) for kind in ("token", "sequence", "constant")]
    assert [figure.item() for figure in figures] == pytest.approx([9 / 10, (1 + 4) / 4, 9 / 20])


# Two rows of 2 and 3 trained tokens, with advantages 1 and -2; clip 0.2. The terms min(...) are
#   row 0: ratio 1.5 -> min(1.5, 1.2) = 1.2 (clipped)       ratio 0.5 -> min(0.5, 0.8) = 0.5
#   row 1: ratio 1.5 -> min(-3, -2.4) = -3   ratio 0.5 -> min(-1, -1.6) = -1.6 (clipped)   ratio 1 -> -2
RATIOS = [[9.0, 1.5, 0.5, 9.0], [9.0, 1.5, 0.5, 1.0]]
MASK = [[False, True, True, False], [False, True, True, True]]


@pytest.mark.parametrize(
    ("aggregation", "loss", "gradient"),
    [
        # -(1.2 + 0.5 - 3 - 1.6 - 2) / 5
        ("token", 0.98, [[0, 0, -0.5 / 5, 0], [0, 3 / 5, 0, 2 / 5]]),
        # -((1.2 + 0.5) / 2 + (-3 - 1.6 - 2) / 3) / 2
        ("sequence", 0.675, [[0, 0, -0.5 / 4, 0], [0, 3 / 6, 0, 2 / 6]]),
        # -(1.2 + 0.5 - 3 - 1.6 - 2) / (2 * 7)
        ("constant", 0.35, [[0, 0, -0.5 / 14, 0], [0, 3 / 14, 0, 2 / 14]]),
    ],
)
def test_example_by_hand(aggregation, loss, gradient):
    logprobs = torch.tensor([[-9.0, -1.0, -2.0, 7.0], [3.0, -0.5, -3.0, -1.5]], dtype=torch.float64)
    old, mask = logprobs - torch.tensor(RATIOS, dtype=torch.float64).log(), torch.tensor(MASK)
    logprobs.requires_grad_()
    term = clipped_loss(token_ratio(logprobs, old), torch.tensor([[1.0], [-2.0]]) * mask, 0.2, 0.2)
    total = aggregate(term.loss, mask, Denominators(num_tokens=5, num_sequences=2), aggregation, 7)
    assert total.item() == pytest.approx(loss)
    total.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor(gradient, dtype=torch.float64))
    assert [term.clipped_high.nonzero().tolist(), term.clipped_low.nonzero().tolist()] == [[[0, 1]], [[1, 2]]]


def test_sequence_ratios_by_hand():
    """A row of ratios 2 and 8: geometric mean 4, product 16."""
    new, old = torch.tensor([[5.0, 8.0, 5.0, 2.0]]).log(), torch.zeros(1, 4)
    mask = torch.tensor([[False, True, False, True]])
    for normalized, expected in ((True, 4.0), (False, 16.0)):
        ratio = sequence_ratio(new, old, mask, length_normalized=normalized)
        assert ratio[mask].tolist() == pytest.approx([expected, expected])


@pytest.mark.parametrize("normalized", [None, True, False], ids=["token", "mean", "sum"])
@pytest.mark.parametrize("distance", [100.0, -100.0])
def test_a_ratio_beyond_float32_is_never_nan(normalized, distance):
    """exp(100) is infinite in float32: what is clipped, or has no advantage, must have gradient 0, not 0 x inf."""
    mask = torch.tensor([[True, True]])
    for advantage in (1.0, 0.0, -1.0):
        new = torch.full((1, 2), -1.0, requires_grad=True)
        old = new.detach() - distance
        ratio = token_ratio(new, old) if normalized is None else sequence_ratio(new, old, mask, normalized)
        term = clipped_loss(ratio, torch.full((1, 2), advantage), 0.2, 0.2)
        (gradient,) = torch.autograd.grad(term.loss.sum(), new)
        assert torch.isfinite(term.loss).all()
        assert torch.isfinite(gradient).all()
        if advantage == 0 or (advantage > 0) == (distance > 0):
            bound = 1.2 if distance > 0 else 0.8
            assert term.loss.tolist() == [pytest.approx([-advantage * bound] * 2)]
            assert not gradient.any()


def test_correction_by_hand():
    """Weights 0.25, 1, 4 between 0.5 and 2, and a row of product 4 over its two trained tokens."""
    old, rollout = torch.tensor([[0.25, 1.0, 4.0, 100.0]]).log(), torch.zeros(1, 4)
    mask = torch.tensor([[True, True, True, False]])
    truncated = correction_weights(old, rollout, mask, Correction(cap=2.0, floor=0.5))
    assert truncated[mask].tolist() == pytest.approx([0.5, 1, 2])
    dropped = correction_weights(old, rollout, mask, Correction(mode="mask", cap=2.0, floor=0.5))
    assert dropped[mask].tolist() == pytest.approx([0, 1, 0])
    mask = torch.tensor([[False, True, True, False]])
    for cap, weight in ((5.0, 4.0), (3.0, 3.0)):
        of_row = correction_weights(old, rollout, mask, Correction(level="sequence", cap=cap))
        assert of_row[mask].tolist() == pytest.approx([weight, weight])
