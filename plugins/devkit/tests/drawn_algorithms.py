"""Algorithms of a draw that the kit did not know, one mistake each, and a correct one of unusual style."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from broken_algorithms import Fine, present
from torch import Tensor
from unusual_algorithms import FollowsTheEntropy

from rlplug.interfaces import Advantages, Algorithm, Denominators, LossOutput, Needs
from rlplug.types import Batch, Sample, StepBatch


class MeasuresStalenessInTheMicroBatch(Fine):
    """Tokens of older policies count less than those of the newest in the micro-batch."""

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        versions = present(micro_batch.policy_versions)
        if len(versions):
            age = (versions.max() - versions).float()
            micro_batch = micro_batch.replace(advantages=present(micro_batch.advantages) * 0.9**age)
        return super().loss(micro_batch, logprobs, entropy, denominators)


class SkipsWhatTeachesNothing(Fine):
    """A constant where no advantage is other than 0: this rank has no backward pass, for which others wait."""

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        if bool(present(micro_batch.advantages).any()):
            return super().loss(micro_batch, logprobs, entropy, denominators)
        ratio = self.ratio(logprobs.detach() - present(micro_batch.old_logprobs))
        return LossOutput(
            torch.zeros((), requires_grad=True), {"made/ratio": ratio.sum() / max(denominators.num_tokens, 1)}
        )


class SelectsWhatIsNew(Fine):
    """Leaves out completions of an earlier group or step."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[bytes] = set()

    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        texts = [sample.token_ids.tobytes() for sample in group]
        new = [sample for sample, text in zip(group, texts, strict=True) if text not in self.known]
        self.known.update(texts)
        return new or group


class KeepsTheMeanOfItsRank(Fine):
    """A baseline of the step before, of this rank's rewards alone; it begins alike on all ranks."""

    mean = latest = 0.0

    def advantages(self, batch: StepBatch) -> Advantages:
        found = super().advantages(batch)
        valid = batch.rewards[batch.reward_valid]
        self.latest = float(valid.mean()) if len(valid) else 0.0
        return dataclasses.replace(found, of_sequences=present(found.of_sequences) * (1 + self.mean))

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        self.mean = self.latest

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.mean = state["mean"]


class SelectsByFailedRewards(Fine):
    """Leaves out groups whose rewards are all equal, those that failed included."""

    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        return group if len({sample.trained_reward for sample in group}) > 1 else ()


class ClampsFarTargets(Fine):
    """Values from before the update are clamped where they lie."""

    def value_loss(self, micro_batch: Batch, values: Tensor, denominators: Denominators) -> LossOutput:
        present(micro_batch.values).clamp_(-10, 10)
        return super().value_loss(micro_batch, values, denominators)


class ForgetsItsAverage(Fine):
    """The scale is in its state, and not the average of rewards that moves it."""

    average = 0.0

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.average = 0.9 * self.average + 0.1 * metrics.get("reward/mean", 0.0)
        self.scale *= 1.01 if self.average < 0.7 else 0.99


class SubtractsSquares(Fine):
    """The variance is the mean of squares less the square of the mean, which round-off makes negative."""

    def centred(self, batch: StepBatch) -> Tensor:
        centred = super().centred(batch)
        for group in set(batch.group_index.tolist()):
            rows = (batch.group_index == group) & batch.reward_valid
            rewards = batch.rewards[rows]
            if len(rewards) > 1 and rewards.max() > rewards.min():
                centred[rows] /= (rewards.square().mean() - rewards.mean().square()).sqrt() + 1e-4
        return centred


class WeighsByLength(Algorithm):
    """A baseline weighted by lengths (arXiv:2505.23585), in double precision; ``needs`` is no property."""

    needs: Any = Needs(groups=True)

    def advantages(self, batch: StepBatch) -> Advantages:
        found = torch.zeros(batch.num_sequences, dtype=torch.float64)
        for number in batch.group_index.unique():
            rows = (batch.group_index == number) & batch.reward_valid
            rewards, weights = batch.rewards[rows].double(), batch.num_tokens[rows].double()
            if len(rewards.unique()) > 1:
                found[rows] = rewards - (weights * rewards).sum() / weights.sum().clamp(min=1)
        return Advantages(of_sequences=found.float())

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        ratio = (logprobs - present(micro_batch.old_logprobs)).clamp(-10, 10).exp()
        means = micro_batch.sums(ratio * present(micro_batch.advantages)) / micro_batch.num_tokens.clamp(min=1)
        return LossOutput(-means.sum() / max(denominators.num_sequences, 1))


class KeepsAMeanOfShares(Fine):
    """Weighs by a mean of rewards, of which the state has no more than 1."""

    mean = 0.0

    def advantages(self, batch: StepBatch) -> Advantages:
        found = super().advantages(batch)
        return dataclasses.replace(found, of_sequences=present(found.of_sequences) * (1 + abs(self.mean)))

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        self.mean += 0.1 * (metrics.get("reward/mean", 0.0) - self.mean)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"mean": min(1.0, max(0.0, self.mean))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.mean = state["mean"]


class ForgetsItsCount(FollowsTheEntropy):
    """Leaves the number of steps, by which its mean is one, out of its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient, "mean": self.mean}


class AsksWhatItPaysAtFirst(FollowsTheEntropy):
    """Needs the gradient of the entropy where it pays for it already."""

    @property
    def needs(self) -> Needs:
        return Needs(entropy_gradient=self.coefficient > 0)


class FollowsTheEntropyOfItsRank(FollowsTheEntropy):
    own = 0.0

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        self.own = float(entropy.detach().sum()) / max(len(entropy), 1)
        return super().loss(micro_batch, logprobs, entropy, denominators)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step({"own/entropy": self.own})
