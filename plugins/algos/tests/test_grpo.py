"""GRPO against a float64 NumPy oracle, written from the equations in ``GRPO``'s docstring, and against hand sums."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from rlplug_algos.grpo import GRPO

from rlplug.errors import ConfigError
from rlplug.interfaces import Denominators, Needs
from rlplug.types import Batch

CONFIGS = [
    {},
    {"aggregation": "sequence"},
    {"kl_coefficient": 0.3, "clip": 0.1},
    {"kl_coefficient": 0.05, "aggregation": "sequence", "normalize_std": False, "epsilon": 1e-2},
]


def oracle_advantages(batch, normalize_std=True, epsilon=1e-4, **other):
    """A for each sequence: [B] float64, and the share of groups without a signal."""
    rewards, valid, groups = (x.numpy() for x in (batch.rewards, batch.reward_valid, batch.group_index))
    out, degenerate = numpy.zeros(len(rewards)), 0
    for group in set(groups.tolist()):
        rows = [row for row in range(len(rewards)) if groups[row] == group and valid[row]]
        r = rewards[rows].astype(numpy.float64)
        if len(set(r.tolist())) < 2:
            degenerate += 1
            continue
        scale = numpy.sqrt(((r - r.mean()) ** 2).sum() / (len(r) - 1)) + epsilon if normalize_std else 1.0
        out[rows] = (r - r.mean()) / scale
    return out, degenerate / len(set(groups.tolist()))


def oracle_loss(batch, logprobs, clip=0.2, kl_coefficient=0.0, aggregation="token", **other):
    """L, its gradient [B, T] with respect to the logprobs, and the metrics."""
    mask = batch.response_mask.numpy()
    old, ref, advantages = (x.double().numpy() for x in (batch.old_logprobs, batch.ref_logprobs, batch.advantages))
    num_tokens, num_sequences = int(mask.sum()), int(mask.any(axis=1).sum())
    loss, gradient, clipped, kl = 0.0, numpy.zeros(mask.shape), 0, 0.0
    for i, t in zip(*mask.nonzero(), strict=True):
        weight = 1 / num_tokens if aggregation == "token" else 1 / (mask[i].sum() * num_sequences)
        a, ratio = advantages[i, t], math.exp(logprobs[i, t] - old[i, t])
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        d = ref[i, t] - logprobs[i, t]
        k3 = math.exp(d) - 1 - d
        loss -= weight * (min(ratio * a, bounded * a) - kl_coefficient * k3)
        stops = bounded * a < ratio * a
        gradient[i, t] = weight * (kl_coefficient * (1 - math.exp(d)) - (0.0 if stops else ratio * a))
        clipped, kl = clipped + stops, kl + k3
    metrics = {"policy/clip_fraction": clipped / max(num_tokens, 1)}
    if kl_coefficient:
        metrics["policy/kl"] = kl / max(num_tokens, 1)
    return loss, gradient, metrics


def random_batch(seed, dtype=torch.float64):
    """Ragged rows of 1 to 5 groups in any order: empty completions, failed rewards, groups of equal rewards."""
    random = numpy.random.default_rng(seed)
    groups = [number * 7 + 3 for number in range(random.integers(1, 6)) for _ in range(random.integers(1, 7))]
    groups = random.permutation(groups)
    size, width = len(groups), int(random.integers(3, 12))
    prompts = random.integers(1, width, size)
    lengths = random.integers(prompts, width + 1)
    lengths[random.random(size) < 0.1] = 1
    positions = numpy.arange(width)
    attention = positions < lengths[:, None]
    valid = random.random(size) < 0.85
    rewards = numpy.where(random.random() < 0.5, random.integers(0, 2, size), random.normal(size=size) * 3)
    rewards = numpy.where(groups == groups[0], 0.1, rewards) if random.random() < 0.3 else rewards
    mask = attention & (positions >= prompts[:, None]) & valid[:, None]
    current = -random.exponential(size=(size, width))
    tensors = {
        "input_ids": random.integers(0, 9, (size, width)),
        "attention_mask": attention,
        "response_mask": mask,
        "reward_valid": valid,
        "group_index": groups,
    }
    floats = {
        "rollout_logprobs": current,
        "rewards": numpy.where(valid, rewards, 0.0),
        "old_logprobs": current + random.normal(size=current.shape) * 0.25,
        "ref_logprobs": current + random.normal(size=current.shape) * 0.5,
    }
    batch = Batch(
        **{name: torch.from_numpy(value) for name, value in tensors.items()},
        **{name: torch.from_numpy(value).to(dtype) for name, value in floats.items()},
    )
    return batch, torch.from_numpy(current).to(dtype).requires_grad_()


def denominators_of(batch):
    tokens = batch.response_mask.sum(dim=1)
    return Denominators(int(tokens.sum()), int((tokens > 0).sum()))


def loss_of(algorithm, batch, logprobs, denominators=None):
    unused = torch.zeros_like(logprobs)
    return algorithm.loss(batch, logprobs, unused, None, denominators or denominators_of(batch))


@pytest.mark.parametrize("seed", range(60))
def test_advantages(seed):
    batch, _ = random_batch(seed)
    for config in CONFIGS:
        result = GRPO(**config).advantages(batch)
        expected, degenerate = oracle_advantages(batch, **config)
        numpy.testing.assert_allclose(
            result.advantages.numpy(), expected[:, None] * batch.response_mask.numpy(), rtol=1e-12, atol=1e-12
        )
        assert result.metrics == {"advantages/degenerate_groups": pytest.approx(degenerate)}
        assert result.returns is None


@pytest.mark.parametrize("seed", range(60))
def test_loss_and_gradient(seed):
    batch, logprobs = random_batch(seed)
    batch = batch.replace(advantages=GRPO().advantages(batch).advantages)
    for config in CONFIGS:
        output = loss_of(GRPO(**config), batch, logprobs)
        (gradient,) = torch.autograd.grad(output.loss, logprobs)
        loss, expected, metrics = oracle_loss(batch, logprobs.detach().numpy(), **config)
        assert output.loss.item() == pytest.approx(loss, rel=1e-12, abs=1e-12)
        numpy.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-10, atol=1e-12)
        assert {name: value.item() for name, value in output.metrics.items()} == pytest.approx(metrics, abs=1e-6)


def test_the_random_batches_hold_every_odd_case():
    batches = [random_batch(seed)[0] for seed in range(60)]
    assert any(not batch.response_mask.any() for batch in batches)
    assert any((batch.reward_valid & ~batch.response_mask.any(dim=1)).any() for batch in batches)
    assert any((~batch.reward_valid).any() for batch in batches)
    degenerate = [oracle_advantages(batch)[1] for batch in batches]
    assert 0 < sum(share == 1 for share in degenerate) < sum(share > 0 for share in degenerate) < 60
    fractions = [
        oracle_loss(b.replace(advantages=GRPO().advantages(b).advantages), x.detach().numpy())[2]
        for b, x in map(random_batch, range(60))
    ]
    assert sum(metrics["policy/clip_fraction"] > 0.1 for metrics in fractions) > 20


@pytest.mark.parametrize("seed", range(10))
def test_float32_is_enough(seed):
    batch, logprobs = random_batch(seed, torch.float32)
    advantages = GRPO().advantages(batch).advantages
    assert advantages.dtype == torch.float32
    batch = batch.replace(advantages=advantages)
    output = loss_of(GRPO(kl_coefficient=0.3), batch, logprobs)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    loss, expected, _ = oracle_loss(batch, logprobs.detach().double().numpy(), kl_coefficient=0.3)
    assert output.loss.item() == pytest.approx(loss, rel=1e-5, abs=1e-6)
    numpy.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("size", [1, 3, None])
def test_the_split_into_micro_batches_changes_nothing(size, config):
    for seed in range(12):
        batch, logprobs = random_batch(seed)
        batch = batch.replace(advantages=GRPO().advantages(batch).advantages)
        whole, denominators = loss_of(GRPO(**config), batch, logprobs), denominators_of(batch)
        rows = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed))
        parts = []
        for chosen in rows.split(size or len(rows)):
            micro = batch.select(chosen.tolist())
            current = logprobs[chosen, : micro.input_ids.shape[1]]
            parts.append(loss_of(GRPO(**config), micro, current, denominators))
        total = sum(part.loss for part in parts)
        assert total.item() == pytest.approx(whole.loss.item(), rel=1e-12, abs=1e-14)
        gradients = [torch.autograd.grad(loss, logprobs)[0] for loss in (total, whole.loss)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)
        for name, value in whole.metrics.items():
            assert sum(part.metrics[name] for part in parts).item() == pytest.approx(value.item(), abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_at_ratio_one_it_is_the_policy_gradient(aggregation):
    batch, logprobs = random_batch(seed=1)
    batch = batch.replace(advantages=GRPO().advantages(batch).advantages, old_logprobs=logprobs.detach())
    output = loss_of(GRPO(aggregation=aggregation), batch, logprobs)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    mask = batch.response_mask
    weights = 1 / mask.sum() if aggregation == "token" else 1 / mask.sum(dim=1, keepdim=True) / mask.any(dim=1).sum()
    torch.testing.assert_close(gradient, torch.where(mask, -batch.advantages * weights, 0.0))
    assert gradient.abs().max() > 1e-3
    assert output.metrics["policy/clip_fraction"] == 0


@pytest.mark.parametrize("scale", [0.01, 7.0, 1e4])
def test_scaling_and_shifting_rewards_leaves_normalised_advantages(scale):
    batch, _ = random_batch(seed=2)
    moved = batch.replace(rewards=torch.where(batch.reward_valid, batch.rewards * scale - 5.0, 0.0))
    normalised, centred = GRPO(epsilon=0.0), GRPO(normalize_std=False)
    before = normalised.advantages(batch).advantages
    torch.testing.assert_close(normalised.advantages(moved).advantages, before, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        centred.advantages(moved).advantages, centred.advantages(batch).advantages * scale, rtol=1e-9, atol=1e-9
    )
    assert before.abs().max() > 0.5


def test_kl_estimate_is_never_negative():
    """In float32 and down to the smallest differences, where k3 is d^2 / 2."""
    for size in (1e-5, 1e-4, 1e-3, 0.1, 1.0, 10.0):
        batch, logprobs = random_batch(seed=3, dtype=torch.float32)
        noise = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0)) * size
        logprobs = torch.zeros_like(logprobs)
        batch = batch.replace(advantages=torch.zeros_like(logprobs), ref_logprobs=noise, old_logprobs=logprobs)
        kl = loss_of(GRPO(kl_coefficient=1.0), batch, logprobs).metrics["policy/kl"].item()
        d = noise[batch.response_mask].double()
        assert kl > 0
        assert kl == pytest.approx((d.exp() - 1 - d).mean().item(), rel=1e-3)


# Two sequences, of 2 and 3 trained tokens, with advantages 1 and -2; clip 0.2. The terms min(...) are
#   row 0: ratio 1.5 -> min(1.5, 1.2) = 1.2 (clipped)       ratio 0.5 -> min(0.5, 0.8) = 0.5
#   row 1: ratio 1.5 -> min(-3, -2.4) = -3   ratio 0.5 -> min(-1, -1.6) = -1.6 (clipped)   ratio 1 -> -2
# d = ln 2 everywhere, so k3 = 2 - 1 - ln 2.
RATIOS = [[9.0, 1.5, 0.5, 9.0], [9.0, 1.5, 0.5, 1.0]]
K3 = 1 - math.log(2)


def example():
    logprobs = torch.tensor([[-9.0, -1.0, -2.0, 7.0], [3.0, -0.5, -3.0, -1.5]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True, False], [False, True, True, True]])
    batch = Batch(
        input_ids=torch.zeros(2, 4, dtype=torch.int64),
        attention_mask=torch.ones(2, 4, dtype=torch.bool),
        response_mask=mask,
        rollout_logprobs=torch.zeros(2, 4),
        rewards=torch.zeros(2),
        reward_valid=torch.ones(2, dtype=torch.bool),
        group_index=torch.zeros(2, dtype=torch.int64),
        old_logprobs=logprobs - torch.tensor(RATIOS).log(),
        ref_logprobs=logprobs + math.log(2),
        advantages=torch.tensor([[1.0], [-2.0]]) * mask,
    )
    return batch, logprobs.requires_grad_()


@pytest.mark.parametrize(
    ("aggregation", "loss", "gradient"),
    [
        # -(1.2 + 0.5 - 3 - 1.6 - 2) / 5
        ("token", 0.98, [[0, 0, -0.5 / 5, 0], [0, 3 / 5, 0, 2 / 5]]),
        # -((1.2 + 0.5) / 2 + (-3 - 1.6 - 2) / 3) / 2
        ("sequence", 0.675, [[0, 0, -0.5 / 4, 0], [0, 3 / 6, 0, 2 / 6]]),
    ],
)
def test_example_by_hand(aggregation, loss, gradient):
    batch, logprobs = example()
    output = loss_of(GRPO(clip=0.2, aggregation=aggregation), batch, logprobs)
    assert output.loss.item() == pytest.approx(loss, abs=1e-6)
    output.loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=1e-6)
    assert {name: value.item() for name, value in output.metrics.items()} == {
        "policy/clip_fraction": pytest.approx(0.4)
    }


@pytest.mark.parametrize(("aggregation", "loss"), [("token", 0.98), ("sequence", 0.675)])
def test_example_with_kl_by_hand(aggregation, loss):
    """Either aggregation's weights add up to 1, so the penalty adds beta x k3."""
    batch, logprobs = example()
    output = loss_of(GRPO(clip=0.2, aggregation=aggregation, kl_coefficient=0.1), batch, logprobs)
    assert output.loss.item() == pytest.approx(loss + 0.1 * K3, abs=1e-6)
    assert output.metrics["policy/kl"].item() == pytest.approx(K3, abs=1e-6)


def test_advantages_by_hand():
    """Rewards 1, 0, 0, 1: mean 1/2, unbiased variance 4 x 1/4 / 3 = 1/3, so A = 0.5 / (0.57735 + 1e-4)."""
    batch, _ = example()
    batch = batch.select([0, 1, 0, 1]).replace(
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]),
        reward_valid=torch.ones(4, dtype=torch.bool),
        group_index=torch.zeros(4, dtype=torch.int64),
    )
    advantages = GRPO().advantages(batch).advantages
    assert advantages[:, 1].tolist() == pytest.approx([0.865876, -0.865876, -0.865876, 0.865876], abs=1e-5)


def test_a_reference_policy_is_asked_for_only_with_kl():
    assert GRPO().needs == Needs()
    assert GRPO(kl_coefficient=0.01).needs == Needs(reference_policy=True)


@pytest.mark.parametrize("clip", [0.0, 1.0, -0.2, 1.5, math.nan])
def test_clip_out_of_range(clip):
    with pytest.raises(ConfigError, match=r"GRPO's clip is .*: give a number between 0 and 1, such as 0\.2"):
        GRPO(clip=clip)


def test_negative_kl_coefficient():
    with pytest.raises(ConfigError, match=r"GRPO's kl_coefficient is -0\.1: give 0 or more"):
        GRPO(kl_coefficient=-0.1)


def test_keeps_every_group():
    assert GRPO().select([(), ()]) == [True, True]
    assert GRPO().max_refills == 0
