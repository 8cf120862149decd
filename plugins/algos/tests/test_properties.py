"""What must hold for any batch: how rows are ordered and split never changes what is learned."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from algorithm_cases import CASES, WITH_CRITIC, advantages_of, loss_of, ready, sampled, value_loss_of
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import MAX_NEW_TOKENS, denominators_of, random_batch

from rlplug.interfaces import Denominators

pytestmark = pytest.mark.kit

few = settings(max_examples=8, derandomize=True)
seeds = st.integers(0, 999)
EXACT = {"rtol": 1e-9, "atol": 1e-12}
STREAMED = [case for case in CASES if case.make().streamed_divisor is not None]


def rows_of(batch, rows):
    """The batch's rows in another order, not cut."""
    return dataclasses.replace(batch, **{name: tensor[rows] for name, tensor in batch.tensors().items()})


def learn(algorithm, batch, draw_logprobs, entropy, values, denominators):
    """Policy and value loss, with their gradients' sum where every input ends."""
    output = loss_of(algorithm, batch, draw_logprobs, entropy, denominators)
    if not algorithm.needs.critic:
        return output.loss, output
    critic = value_loss_of(algorithm, batch, values, denominators)
    return output.loss + critic.loss, dataclasses.replace(output, metrics=output.metrics | critic.metrics)


def gradients(loss, leaves):
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(
            leaves, torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True), strict=True
        )
    ]


def assert_same(actual, expected, leaves):
    """Two results of :func:`learn`, of the same leaves."""
    torch.testing.assert_close(actual[0], expected[0], **EXACT)
    torch.testing.assert_close(gradients(actual[0], leaves), gradients(expected[0], leaves), **EXACT)
    for kind in ("metrics", "maxima", "minima"):
        left, right = (getattr(result[1], kind) for result in (actual, expected))
        assert left.keys() == right.keys()
        for name, value in right.items():
            assert left[name].item() == pytest.approx(value.item(), rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("case", CASES, ids=str)
@few
@given(seed=seeds, order=st.randoms(use_true_random=False))
def test_the_order_of_rows(case, seed, order):
    draw = random_batch(seed)
    algorithm, batch = sampled(case, draw)
    rows = torch.tensor(order.sample(range(batch.num_sequences), batch.num_sequences))
    before, after = advantages_of(algorithm, batch), advantages_of(algorithm, rows_of(batch, rows))
    torch.testing.assert_close(after.advantages, before.advantages[rows], **EXACT)
    assert after.metrics == pytest.approx(before.metrics)

    algorithm, batch = ready(case, draw)
    leaves = [draw.logprobs, draw.entropy, draw.values]
    expected = learn(algorithm, batch, *leaves, denominators_of(batch))
    actual = learn(algorithm, rows_of(batch, rows), *(x[rows] for x in leaves), denominators_of(batch))
    assert_same(actual, expected, leaves)


@pytest.mark.parametrize("case", CASES, ids=str)
@few
@given(seed=seeds, order=st.randoms(use_true_random=False), size=st.integers(1, 4))
def test_the_split_into_micro_batches(case, seed, order, size):
    """Shares and metrics add up and extremes stay, with the mini-batch's denominators, whatever the split."""
    draw = random_batch(seed)
    algorithm, batch = ready(case, draw)
    leaves, denominators = [draw.logprobs, draw.entropy, draw.values], denominators_of(batch)
    rows = order.sample(range(batch.num_sequences), batch.num_sequences)
    parts = []
    for start in range(0, len(rows), size):
        chosen = rows[start : start + size]
        micro = batch.select(chosen)
        parts.append(learn(algorithm, micro, *(x[chosen, : micro.input_ids.shape[1]] for x in leaves), denominators))
    outputs = [output for _, output in parts]
    whole = dataclasses.replace(
        outputs[0],
        metrics={name: sum(output.metrics[name] for output in outputs) for name in outputs[0].metrics},
        maxima={name: max(output.maxima[name] for output in outputs) for name in outputs[0].maxima},
        minima={name: min(output.minima[name] for output in outputs) for name in outputs[0].minima},
    )
    actual = sum(loss for loss, _ in parts), whole
    assert_same(actual, learn(algorithm, batch, *leaves, denominators), leaves)


@pytest.mark.parametrize(
    "case", [case for case in CASES if not {"kl", "correction", "nll"} & set(case.oracle)], ids=str
)
def test_at_ratio_1_it_is_the_policy_gradient(case):
    """Nothing is clipped, and the gradient is -A / N by the aggregation's N, spread as the row's ratio spreads it."""
    largest = 0.0
    for seed in range(20):
        draw = random_batch(seed)
        algorithm, batch = ready(case, draw)
        batch = batch.replace(old_logprobs=draw.logprobs.detach())
        output = loss_of(algorithm, batch, draw.logprobs, draw.entropy, denominators_of(batch))
        mask = batch.response_mask
        lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
        divisors = {
            "token": mask.sum(),
            "sequence": lengths * mask.any(dim=1).sum(),
            "constant": mask.any(dim=1).sum() * MAX_NEW_TOKENS,
        }
        # a product over a row has a gradient of 1 in each of its tokens' log ratios, for each of the row's terms
        factor = lengths if case.oracle["ratio"] == "sum" else 1
        expected = torch.where(mask, -batch.advantages * factor / divisors[case.oracle["aggregation"]], 0.0)
        torch.testing.assert_close(gradients(output.loss, [draw.logprobs])[0], expected, **EXACT)
        assert output.metrics["policy/approx_kl"] == 0
        if "ratio_range" not in case.oracle:
            assert output.metrics["policy/clip_fraction_low"] == output.metrics["policy/clip_fraction_high"] == 0
        largest = max(largest, expected.abs().max().item())
    assert largest > 0.01


@pytest.mark.parametrize("case", WITH_CRITIC, ids=str)
def test_a_critic_that_is_right_learns_nothing(case):
    for seed in range(20):
        draw = random_batch(seed)
        algorithm, batch = ready(case, draw)
        values = batch.returns.clone().requires_grad_()
        output = value_loss_of(algorithm, batch.replace(values=batch.returns), values, denominators_of(batch))
        assert output.loss == 0
        assert not gradients(output.loss, [values])[0].any()


@pytest.mark.parametrize("case", STREAMED, ids=str)
@few
@given(seed=seeds)
def test_groups_train_alone_where_the_algorithm_says_so(case, seed):
    """Advantages of a group alone are those among others; the loss has the named divisor, and metrics tokens."""
    draw = random_batch(seed)
    algorithm, batch = sampled(case, draw)
    whole = advantages_of(algorithm, batch)
    for group in batch.group_index.unique():
        rows = (batch.group_index == group).nonzero().flatten()
        alone = advantages_of(algorithm, rows_of(batch, rows))
        torch.testing.assert_close(alone.advantages, whole.advantages[rows], **EXACT)

    algorithm, batch = ready(case, draw)
    leaves, divisor = [draw.logprobs, draw.entropy], {"num_tokens": 2, "num_sequences": 3}[algorithm.streamed_divisor]
    total = loss_of(algorithm, batch, *leaves, Denominators(1, 1))
    divided = loss_of(algorithm, batch, *leaves, Denominators(2, 3))
    expected = [gradient * divisor for gradient in gradients(divided.loss, leaves)]
    torch.testing.assert_close(gradients(total.loss, leaves), expected, **EXACT)
    for name, value in total.metrics.items():
        assert divided.metrics[name].item() * 2 == pytest.approx(value.item(), rel=1e-6, abs=1e-9), name


def test_which_algorithms_train_on_groups_alone():
    assert {case.algorithm.__name__ for case in STREAMED} == {"GRPO", "DrGRPO", "GSPO", "CISPO", "RLOO", "DAPO"}
    whole = {case.algorithm.__name__ for case in CASES} - {case.algorithm.__name__ for case in STREAMED}
    assert whole == {"ReinforcePP", "ReinforcePPBaseline", "PPO", "VAPO", "PFPPO"}
