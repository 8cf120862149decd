"""Algorithms whose advantages or selection have a mistake each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from broken_algorithms import Fine
from torch import Tensor

from rlplug.interfaces import Advantages
from rlplug.types import Sample, StepBatch


class RaisesInAdvantages(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        raise KeyError("kl")


class ReadsUndeclaredOldLogprobs(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        assert batch.tokens.old_logprobs is not None
        return super().advantages(batch)


class ReadsUndeclaredRolloutLogprobs(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        result = super().advantages(batch)
        assert result.of_sequences is not None
        return replace(
            result, of_sequences=result.of_sequences * batch.tokens.sums(batch.tokens.rollout_logprobs).exp()
        )


class ReturnsDoubles(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        result = super().advantages(batch)
        assert result.of_sequences is not None
        return replace(result, of_sequences=result.of_sequences.double())


class ForgetsReturns(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        return replace(super().advantages(batch), returns=None)


class ReturnsNaN(Fine):
    """0 / 0 in a group of equal rewards."""

    def centred(self, batch: StepBatch) -> Tensor:
        centred = super().centred(batch)
        for group in set(batch.group_index.tolist()):
            rows = (batch.group_index == group) & batch.reward_valid
            if int(rows.sum()):
                centred[rows] = centred[rows] / batch.rewards[rows].std(unbiased=False)
        return centred


class ReturnsATextMetric(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        return replace(super().advantages(batch), metrics={"made/size": "large"})  # type: ignore[dict-item]


class SelectsCopies(Fine):
    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        return [replace(sample, reward=sample.reward + 1) for sample in group]


class SelectsTwice(Fine):
    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        return [*group, max(group, key=lambda sample: sample.reward)]


class SelectsByItsCalls(Fine):
    calls = 0

    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        self.calls += 1
        return group[: 1 + self.calls % 3]


class DrawsPerObject(Fine):
    def __init__(self) -> None:
        super().__init__()
        self.noise = random.Random().random()

    def centred(self, batch: StepBatch) -> Tensor:
        return super().centred(batch) * self.noise


class WritesIntoRewards(Fine):
    def centred(self, batch: StepBatch) -> Tensor:
        centred = super().centred(batch)
        batch.rewards.mul_(0.5)
        return centred


class CountsFailedRewards(Fine):
    def counts(self, batch: StepBatch) -> Tensor:
        return torch.ones_like(batch.reward_valid)


class TrainsOnFailedRewards(Fine):
    """They do not count in the mean, and get an advantage all the same."""

    def centred(self, batch: StepBatch) -> Tensor:
        return torch.where(batch.reward_valid, super().centred(batch), -1.0)


class FavoursTheFirst(Fine):
    """The first completion of a group is its baseline."""

    def centred(self, batch: StepBatch) -> Tensor:
        centred = super().centred(batch)
        for group in set(batch.group_index.tolist()):
            rows = ((batch.group_index == group) & batch.reward_valid).nonzero().flatten()
            if len(rows):
                centred[rows] = batch.rewards[rows] - batch.rewards[rows[0]]
        return centred


class NeedsCompletions(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        batch.rewards.max()
        return super().advantages(batch)


class NeedsRewards(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        result = super().advantages(batch)
        moments = batch.step.moments(batch.rewards, batch.reward_valid)
        return replace(result, metrics={"made/best": moments.largest})


class NormalisesPerRank(Fine):
    def centred(self, batch: StepBatch) -> Tensor:
        centred = super().centred(batch)
        return centred / (centred.abs().mean() + 1e-6) if len(centred) else centred


class MeasuresItsRank(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        result = super().advantages(batch)
        return replace(result, metrics={"made/completions": float(batch.num_sequences)})


class AsksWhereItHasCompletions(Fine):
    """A rank without completions does not come to the meeting."""

    def advantages(self, batch: StepBatch) -> Advantages:
        if not batch.num_sequences:
            return Advantages(batch.rewards.clone(), returns=torch.zeros(0))
        return super().advantages(batch)


class BlowsUpRoundOff(Fine):
    def centred(self, batch: StepBatch) -> Tensor:
        centred = torch.zeros_like(batch.rewards)
        for group in set(batch.group_index.tolist()):
            rows = (batch.group_index == group) & batch.reward_valid
            rewards = batch.rewards[rows]
            if len(rewards) > 1:
                centred[rows] = rewards - 0.999 * rewards.mean()
        return centred
