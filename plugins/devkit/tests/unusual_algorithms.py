"""Correct algorithms of unusual style, which the kit must not refuse."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug.interfaces import Advantages, Algorithm, Denominators, LossOutput, Needs, RunInfo
from rlplug.types import Batch, Sample, StepBatch

__all__ = [
    "ComparesWithTheMean",
    "Delegating",
    "DrawsBySeed",
    "FollowsTheEntropy",
    "FrozenWithSlots",
    "GatesSoftly",
    "KeepsAWindow",
    "MadeOfClosures",
    "MasksByTheEngine",
    "OwnBackward",
    "PaysForEntropy",
    "PenalisesByTheFirstEstimator",
    "PenalisesInRewards",
    "PenalisesInTheLoss",
    "PlainNumbers",
    "RanksRewards",
    "WithoutAnnotations",
]


@dataclass(frozen=True, slots=True)
class FrozenWithSlots(Algorithm):
    """Rewards as advantages, in an object that takes no new attribute."""

    clip: float = 0.2
    unused: tuple[int, ...] = field(default=(), repr=False)

    def advantages(self, batch: StepBatch) -> Advantages:
        mean = batch.step.mean(batch.rewards, batch.reward_valid)
        return Advantages(torch.where(batch.reward_valid, batch.rewards - mean, 0.0))

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        assert micro_batch.advantages is not None
        assert micro_batch.old_logprobs is not None
        ratio = (logprobs - micro_batch.old_logprobs).clamp(-10, 10).exp()
        unclipped = ratio * micro_batch.advantages
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip) * micro_batch.advantages
        return LossOutput(-torch.minimum(unclipped, clipped).sum() / max(denominators.num_tokens, 1))


class WithoutAnnotations(Algorithm):
    """As people write it in a notebook."""

    coefficient = 1

    def advantages(self, batch):
        mean = batch.step.mean(batch.rewards, batch.reward_valid)
        return Advantages(of_tokens=batch.spread(torch.where(batch.reward_valid, batch.rewards - mean, 0.0)))

    def loss(self, micro_batch, logprobs, entropy, denominators):
        ratio = (logprobs - micro_batch.old_logprobs).clamp(max=10).exp()
        return LossOutput(loss=-(self.coefficient * ratio * micro_batch.advantages).sum() / denominators.num_tokens)


class PlainNumbers(FrozenWithSlots):
    """Computes with numpy's arrays, group by group."""

    @property
    def needs(self) -> Needs:
        return Needs(groups=True)

    def advantages(self, batch: StepBatch) -> Advantages:
        rewards, valid = batch.rewards.numpy(), batch.reward_valid.numpy()
        found = np.zeros_like(rewards)
        for number in np.unique(batch.group_index.numpy()):
            rows = (batch.group_index.numpy() == number) & valid
            if rows.any() and np.ptp(rewards[rows]) > 0:
                found[rows] = rewards[rows] - rewards[rows].mean()
        return Advantages(torch.from_numpy(found), metrics={"made/largest": np.float64(batch.step.mean(batch.rewards))})


class Product(torch.autograd.Function):
    """A ratio times an advantage, whose gradient is written by hand, as an extension in C++ has it."""

    @staticmethod
    def forward(context: Any, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        product = (logprobs - old).clamp(-10, 10).exp() * advantages
        context.save_for_backward(product)
        return product

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient * context.saved_tensors[0], None, None


class OwnBackward(FrozenWithSlots):
    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        product: Tensor = Product.apply(logprobs, micro_batch.old_logprobs, micro_batch.advantages)  # type: ignore[no-untyped-call]
        return LossOutput(
            -product.sum() / max(denominators.num_tokens, 1),
            maxima={"made/largest": product.detach().amax() if len(product) else torch.tensor(-torch.inf)},
            per_token={"product": product.detach()},
        )


class Delegating(Algorithm):
    """Has an algorithm within, and passes on all that it does not change."""

    def __init__(self) -> None:
        self.inner = FrozenWithSlots(0.3)

    @functools.cached_property
    def bound(self) -> float:
        return 5.0

    def advantages(self, batch: StepBatch) -> Advantages:
        found = self.inner.advantages(batch)
        assert found.of_sequences is not None
        return Advantages(found.of_sequences.clamp(-self.bound, self.bound), metrics=found.metrics)

    def loss(self, *arguments: Any, **named: Any) -> LossOutput:
        return self.inner.loss(*arguments, **named)


class PaysForEntropy(FrozenWithSlots):
    """Has a term of the entropy, which is raised."""

    @property
    def needs(self) -> Needs:
        return Needs(entropy_gradient=True)

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = super().loss(micro_batch, logprobs, entropy, denominators)
        return replace(output, loss=output.loss - 0.01 * entropy.sum() / max(denominators.num_tokens, 1))


class FollowsTheEntropy(Algorithm):
    """Pays for entropy where the steps' mean is below a target; at first it pays nothing."""

    target = 0.5

    def __init__(self) -> None:
        self.coefficient, self.mean, self.count = 0.0, 0.0, 0

    @property
    def needs(self) -> Needs:
        return Needs(entropy_gradient=True)

    def advantages(self, batch: StepBatch) -> Advantages:
        return FrozenWithSlots().advantages(batch)

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output, mean = FrozenWithSlots().loss(micro_batch, logprobs, entropy, denominators), entropy.sum()
        mean = mean / max(denominators.num_tokens, 1)
        return replace(output, loss=output.loss - self.coefficient * mean, metrics={"own/entropy": mean.detach()})

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.count += 1
        self.mean += (metrics["own/entropy"] - self.mean) / self.count
        self.coefficient = max(0.0, 0.1 * (self.target - self.mean))

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient, "mean": self.mean, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({"coefficient": 0.0, "mean": 0.0, "count": 0} | state)


class MadeOfClosures(Algorithm):
    """Cannot be pickled."""

    def __init__(self) -> None:
        weight = 2.0
        self.weigh: Callable[[Tensor], Tensor] = lambda rewards: weight * rewards

    def advantages(self, batch: StepBatch) -> Advantages:
        mean = batch.step.mean(batch.rewards, batch.reward_valid)
        return Advantages(torch.where(batch.reward_valid, self.weigh(batch.rewards - mean), 0.0))

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        return FrozenWithSlots().loss(micro_batch, logprobs, entropy, denominators)


class DrawsBySeed(FrozenWithSlots):
    """Trains on a random half of each group, drawn by the run's seed and the group."""

    seed = 0

    def setup(self, run: RunInfo) -> None:
        object.__setattr__(self, "seed", run.seed)

    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        drawn = random.Random(f"{self.seed} {group[0].group}")
        order = drawn.sample(range(len(group)), -(-len(group) // 2))
        return [group[index] for index in sorted(order)]


class KeepsAWindow(MadeOfClosures):
    """The mean loss of the last steps, in a queue that a checkpoint has as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.window: deque[float] = deque(maxlen=4)

    def advantages(self, batch: StepBatch) -> Advantages:
        found = super().advantages(batch).of_sequences
        assert found is not None
        mean = sum(self.window) / len(self.window) if self.window else 0.0
        return Advantages(found / (1 + abs(mean)))

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.window.append(metrics["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"window": [*self.window]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.window = deque(state["window"], maxlen=4)


class PenalisesInRewards(FrozenWithSlots):
    """The distance from the reference policy is taken from the reward, and not from the loss."""

    @property
    def needs(self) -> Needs:
        return Needs(reference_policy=True, old_logprobs=True)

    def advantages(self, batch: StepBatch) -> Advantages:
        assert batch.tokens.old_logprobs is not None
        assert batch.tokens.ref_logprobs is not None
        distance = batch.tokens.sums(batch.tokens.old_logprobs - batch.tokens.ref_logprobs)
        rewards = batch.rewards - 0.05 * distance
        mean = batch.step.mean(rewards, batch.reward_valid)
        return Advantages(torch.where(batch.reward_valid, rewards - mean, 0.0))


class PenalisesInTheLoss(FrozenWithSlots):
    """The third estimator of the distance from the reference policy (Schulman, 2020)."""

    @property
    def needs(self) -> Needs:
        return Needs(reference_policy=True)

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        assert micro_batch.ref_logprobs is not None
        output = FrozenWithSlots.loss(self, micro_batch, logprobs, entropy, denominators)
        distance = (micro_batch.ref_logprobs - logprobs).clamp(-10, 10)
        penalty = (distance.exp() - distance - 1).sum() / max(denominators.num_tokens, 1)
        return LossOutput(output.loss + 0.1 * penalty, {"made/distance": penalty.detach()})


class ComparesWithTheMean(FrozenWithSlots):
    """Whether a reward is above the mean, and not by how much: small changes change nothing."""

    def advantages(self, batch: StepBatch) -> Advantages:
        mean = batch.step.mean(batch.rewards, batch.reward_valid)
        difference = torch.where(batch.reward_valid, batch.rewards - mean, 0.0)
        return Advantages(torch.where(difference.abs() > 1e-4, difference.sign(), 0.0))


class RanksRewards(FrozenWithSlots):
    """Ranks within a group, between -1 and 1: a change of a reward counts where it changes places."""

    @property
    def needs(self) -> Needs:
        return Needs(groups=True)

    def advantages(self, batch: StepBatch) -> Advantages:
        is_peer = (batch.group_index[:, None] == batch.group_index) & batch.reward_valid
        order = (batch.rewards[:, None] - batch.rewards).sign() * is_peer
        ranks = order.sum(1) / is_peer.sum(1).clamp(min=1)
        return Advantages(torch.where(batch.reward_valid, ranks, 0.0))


class GatesSoftly(FrozenWithSlots):
    """SAPO (arXiv:2511.20347): a sigmoid of the ratio in place of a clip."""

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        assert micro_batch.advantages is not None
        assert micro_batch.old_logprobs is not None
        ratio = (logprobs - micro_batch.old_logprobs).clamp(-10, 10).exp()
        terms = 4 * torch.sigmoid(ratio - 1) * micro_batch.advantages
        return LossOutput(-terms.sum() / max(denominators.num_tokens, 1))


class MasksByTheEngine(FrozenWithSlots):
    """IcePop (arXiv:2510.18855): tokens that engine and trainer rate otherwise do not train."""

    @property
    def needs(self) -> Needs:
        return Needs(rollout_logprobs=True)

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        assert micro_batch.advantages is not None
        assert micro_batch.old_logprobs is not None
        weights = (micro_batch.old_logprobs - micro_batch.rollout_logprobs).exp()
        weights = weights.masked_fill((weights < 0.5) | (weights > 2), 0.0)
        ratio = (logprobs - micro_batch.old_logprobs).clamp(-10, 10).exp()
        return LossOutput(-(weights * ratio * micro_batch.advantages).sum() / max(denominators.num_tokens, 1))


class PenalisesByTheFirstEstimator(FrozenWithSlots):
    """The log ratio itself times the ratio, whose gradient has the right mean (arXiv:2512.02556)."""

    @property
    def needs(self) -> Needs:
        return Needs(reference_policy=True)

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = FrozenWithSlots.loss(self, micro_batch, logprobs, entropy, denominators)
        assert micro_batch.ref_logprobs is not None
        assert micro_batch.old_logprobs is not None
        ratio = (logprobs - micro_batch.old_logprobs).clamp(-10, 10).exp()
        penalty = (ratio * (logprobs - micro_batch.ref_logprobs)).sum()
        return LossOutput(output.loss + 0.05 * penalty / max(denominators.num_tokens, 1))
