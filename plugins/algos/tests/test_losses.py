"""Ratios, clipped losses, corrections and aggregation against the oracle, and an example worked out by hand."""

from __future__ import annotations

import numpy
import oracles
import pytest
import torch
from oracle_algorithms import arrays
from random_batches import MAX_NEW_TOKENS, SEEDS, assert_agrees, random_batch
from rlplug_algos.aggregation import aggregate
from rlplug_algos.corrections import Correction, limited_weights
from rlplug_algos.policy_losses import cispo_loss, clipped_loss, sequence_ratio, token_ratio
from rlplug_algos.value_losses import clipped_value_loss

from rlplug.interfaces import Denominators
from rlplug.types import Batch


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def dtype(request):
    return request.param


def draws(dtype):
    """Draws of the tokens that train, the padded arrays that the oracle reads, and the logprobs in them, [B, T]."""
    for seed in SEEDS:
        draw = random_batch(seed, dtype)
        yield f"seed {seed}", draw.flat, arrays(draw.batch), draw.logprobs.detach().double().numpy()


def rows_of_tokens(*rows):
    """A batch of which only the number of each row's tokens matters."""
    lengths = torch.tensor(rows)
    index = torch.arange(len(rows)).repeat_interleave(lengths)
    nothing, none = torch.zeros(len(index)), torch.zeros(len(rows))
    return Batch(lengths, index, index, nothing, none, none.bool(), none.long(), none.bool())


@pytest.mark.parametrize("kind", ["token", "mean", "sum"])
def test_ratios(dtype, kind):
    """Value, and the gradient of a weighted sum: a sequence's ratio has one to each of its tokens."""
    for what, draw, data, now in draws(dtype):
        batch, mask = draw.batch, data.response_mask
        if kind == "token":
            ratio = token_ratio(draw.logprobs, batch.old_logprobs)
        else:
            ratio = sequence_ratio(draw.logprobs, batch.old_logprobs, batch, length_normalized=kind == "mean")
        expected = numpy.exp(oracles.log_ratios(now, data.old_logprobs, mask, kind))
        assert_agrees(ratio, expected[mask], dtype, what)
        (gradient,) = torch.autograd.grad((ratio * batch.values).sum(), draw.logprobs)
        moved = numpy.zeros(now.shape)
        for i in range(len(now)):
            tokens = oracles.tokens_of(mask, i)
            for t in tokens:
                for s in tokens:
                    slope = oracles.log_ratio_derivative(mask, i, t, s, kind)
                    moved[i, s] += data.values[i, t] * expected[i, t] * slope
        assert_agrees(gradient, moved[mask], dtype, what, at_least=1.0)


@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.1, 0.3), (3e-4, 4e-4), (0.2, 0.28, 1.3), (0.2, 0.2, 3.0)], ids=str)
def test_clipped_loss(dtype, clip):
    seen = numpy.zeros(2)
    for what, draw, _, _ in draws(dtype):
        ratio = draw.batch.values.exp().requires_grad_()
        advantages = torch.where(draw.batch.spread(draw.batch.truncated), 0.0, draw.batch.ref_logprobs + 1)
        term = clipped_loss(ratio, advantages, *clip)
        (gradient,) = torch.autograd.grad(term.loss.sum(), ratio)
        every = zip(ratio.detach().double().flatten(), advantages.double().flatten(), strict=True)
        expected = [oracles.clipped_loss(r.item(), a.item(), *clip) for r, a in every]
        loss, slope, low, high = zip(*expected, strict=True) if expected else ([], [], [], [])
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
        mask = data.response_mask
        weight = numpy.clip(numpy.exp(now - data.old_logprobs), low, high)[mask]
        assert_agrees(term.loss, -weight * data.values[mask] * now[mask], dtype, what)
        assert_agrees(gradient, -weight * data.values[mask], dtype, what)


@pytest.mark.parametrize("clip", [None, 0.2, 0.05])
def test_clipped_value_loss(dtype, clip):
    for what, draw, _, _ in draws(dtype):
        now, returns = draw.values, draw.batch.ref_logprobs
        loss, clipped = clipped_value_loss(now, draw.batch.values, returns, clip)
        (gradient,) = torch.autograd.grad(loss.sum(), now)
        every = zip(*(x.double().detach().flatten().tolist() for x in (now, draw.batch.values, returns)), strict=True)
        known = [oracles.clipped_value_loss(*x, clip) for x in every]
        expected, slope, stopped = zip(*known, strict=True) if known else ([], [], [])
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
def test_limited_weights(dtype, options):
    limited = 0
    for what, draw, data, _ in draws(dtype):
        old = draw.batch.old_logprobs.clone().requires_grad_()
        weights, is_limited = limited_weights(old, draw.batch, Correction(**options))
        expected, changed = oracles.correction_weights(
            data.old_logprobs, data.rollout_logprobs, data.response_mask, **options
        )
        assert_agrees(weights, expected[data.response_mask], dtype, what)
        assert is_limited.tolist() == changed[data.response_mask].astype(bool).tolist(), what
        assert not weights.requires_grad
        limited += changed.sum()
    assert limited > 50


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_aggregate(dtype, aggregation):
    for what, draw, data, _ in draws(dtype):
        num_tokens = draw.batch.num_tokens
        denominators = Denominators(int(num_tokens.sum()), int((num_tokens > 0).sum()))
        per_token = draw.batch.values.clone().requires_grad_()
        total = aggregate(per_token, draw.batch, denominators, aggregation, MAX_NEW_TOKENS)
        (gradient,) = torch.autograd.grad(total, per_token)
        counts = max(denominators.num_tokens, 1), max(denominators.num_sequences, 1)
        weights = oracles.token_weights(data.response_mask, *counts, aggregation, MAX_NEW_TOKENS)
        assert_agrees(total, (weights * data.values).sum(), dtype, what, at_least=1.0)
        assert_agrees(gradient, weights[data.response_mask], dtype, what)


def test_aggregate_divides_by_the_mini_batch():
    """Values 1, 2, 6 in rows of 1 and 2 tokens; of a mini-batch with 10 tokens, 4 sequences, 5 at most."""
    batch, per_token = rows_of_tokens(1, 2), torch.tensor([1.0, 2.0, 6.0])
    figures = [aggregate(per_token, batch, Denominators(10, 4), kind, 5) for kind in ("token", "sequence", "constant")]
    assert [figure.item() for figure in figures] == pytest.approx([9 / 10, (1 + 4) / 4, 9 / 20])


# Two rows of 2 and 3 trained tokens, with advantages 1 and -2; clip 0.2. The terms min(...) are
#   row 0: ratio 1.5 -> min(1.5, 1.2) = 1.2 (clipped)       ratio 0.5 -> min(0.5, 0.8) = 0.5
#   row 1: ratio 1.5 -> min(-3, -2.4) = -3   ratio 0.5 -> min(-1, -1.6) = -1.6 (clipped)   ratio 1 -> -2
RATIOS = [1.5, 0.5, 1.5, 0.5, 1.0]


@pytest.mark.parametrize(
    ("aggregation", "loss", "gradient"),
    [
        # -(1.2 + 0.5 - 3 - 1.6 - 2) / 5
        ("token", 0.98, [0, -0.5 / 5, 3 / 5, 0, 2 / 5]),
        # -((1.2 + 0.5) / 2 + (-3 - 1.6 - 2) / 3) / 2
        ("sequence", 0.675, [0, -0.5 / 4, 3 / 6, 0, 2 / 6]),
        # -(1.2 + 0.5 - 3 - 1.6 - 2) / (2 * 7)
        ("constant", 0.35, [0, -0.5 / 14, 3 / 14, 0, 2 / 14]),
    ],
)
def test_example_by_hand(aggregation, loss, gradient):
    logprobs, batch = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5], dtype=torch.float64), rows_of_tokens(2, 3)
    old = logprobs - torch.tensor(RATIOS, dtype=torch.float64).log()
    logprobs.requires_grad_()
    term = clipped_loss(token_ratio(logprobs, old), batch.spread(torch.tensor([1.0, -2.0])), 0.2, 0.2)
    total = aggregate(term.loss, batch, Denominators(num_tokens=5, num_sequences=2), aggregation, 7)
    assert total.item() == pytest.approx(loss)
    total.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor(gradient, dtype=torch.float64))
    assert [term.clipped_high.nonzero().tolist(), term.clipped_low.nonzero().tolist()] == [[[0]], [[3]]]


def test_sequence_ratios_by_hand():
    """A row of ratios 2 and 8: geometric mean 4, product 16."""
    new = torch.tensor([8.0, 2.0]).log()
    for normalized, expected in ((True, 4.0), (False, 16.0)):
        ratio = sequence_ratio(new, torch.zeros(2), rows_of_tokens(2), length_normalized=normalized)
        assert ratio.tolist() == pytest.approx([expected, expected])


@pytest.mark.parametrize("normalized", [None, True, False], ids=["token", "mean", "sum"])
@pytest.mark.parametrize("distance", [100.0, -100.0])
def test_a_ratio_beyond_float32_is_never_nan(normalized, distance):
    """exp(100) is infinite in float32: what is clipped, or has no advantage, must have gradient 0, not 0 x inf."""
    batch = rows_of_tokens(2)
    for advantage in (1.0, 0.0, -1.0):
        new = torch.full((2,), -1.0, requires_grad=True)
        old = new.detach() - distance
        ratio = token_ratio(new, old) if normalized is None else sequence_ratio(new, old, batch, normalized)
        term = clipped_loss(ratio, torch.full((2,), advantage), 0.2, 0.2)
        (gradient,) = torch.autograd.grad(term.loss.sum(), new)
        assert torch.isfinite(term.loss).all()
        assert torch.isfinite(gradient).all()
        if advantage == 0 or (advantage > 0) == (distance > 0):
            bound = 1.2 if distance > 0 else 0.8
            assert term.loss.tolist() == pytest.approx([-advantage * bound] * 2)
            assert not gradient.any()


def test_correction_by_hand():
    """Weights 0.25, 1, 4 between 0.5 and 2, and a row of product 4 over its two tokens."""

    def weights(ratios, **options):
        old = torch.tensor(ratios).log()
        return limited_weights(old, rows_of_tokens(len(ratios)), Correction(**options))[0].tolist()

    assert weights([0.25, 1.0, 4.0], cap=2.0, floor=0.5) == pytest.approx([0.5, 1, 2])
    assert weights([0.25, 1.0, 4.0], mode="mask", cap=2.0, floor=0.5) == pytest.approx([0, 1, 0])
    for cap, weight in ((5.0, 4.0), (3.0, 3.0)):
        assert weights([1.0, 4.0], level="sequence", cap=cap) == pytest.approx([weight, weight])
