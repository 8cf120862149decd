"""Algorithms whose equations are wrong, each in one way that people really get them wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from broken_algorithms import ChangedLoss, Fine, present
from broken_claims import NeedsAReferenceForNothing
from rlplug_devkit import Completion, WorkedExample
from torch import Tensor

from rlplug.interfaces import Advantages, Denominators, LossOutput, Needs
from rlplug.types import Batch, StepBatch

# ---- signs --------------------------------------------------------------------------------------------------------


class RewardsTheDistance(NeedsAReferenceForNothing):
    """The penalty in the loss has the sign of a reward."""

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = super().loss(micro_batch, logprobs, entropy, denominators)
        difference = present(micro_batch.ref_logprobs) - logprobs
        k3 = difference.clamp(-20, 20).exp() - 1 - difference
        return replace(output, loss=output.loss - 0.1 * k3.sum() / max(denominators.num_tokens, 1))


class AddsTheDistanceToRewards(Fine):
    """The penalty in the reward has the sign of a bonus."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, reference_policy=True, old_logprobs=True)

    def centred(self, batch: StepBatch) -> Tensor:
        moved = present(batch.tokens.old_logprobs) - present(batch.tokens.ref_logprobs)
        return torch.where(batch.reward_valid, super().centred(batch) + 0.1 * batch.tokens.sums(moved), 0.0)


class PunishesEntropy(Fine):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, entropy_gradient=True)

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = super().loss(micro_batch, logprobs, entropy, denominators)
        return replace(output, loss=output.loss + 0.01 * entropy.sum() / max(denominators.num_tokens, 1))


class DrivesValuesAway(Fine):
    def value_loss(self, micro_batch: Batch, values: Tensor, denominators: Denominators) -> LossOutput:
        return LossOutput(-super().value_loss(micro_batch, values, denominators).loss)


class ForgetsValuesInReturns(Fine):
    """The critic's targets are the advantages, without the values that were subtracted."""

    def advantages(self, batch: StepBatch) -> Advantages:
        values = present(batch.tokens.values)
        result = super().advantages(batch)
        return replace(result, returns=batch.spread(batch.rewards) - values)


# ---- clips --------------------------------------------------------------------------------------------------------


class ClipsBothSides(Fine):
    """A clamp without the minimum: a token that moved the wrong way is never pulled back."""

    def ratio(self, difference: Tensor) -> Tensor:
        return super().ratio(difference).clamp(0.8, 1.2)


class TakesTheLarger(ChangedLoss):
    """The maximum of both objectives in place of the minimum."""

    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        ratio, advantages = self.ratio(logprobs - present(batch.old_logprobs)), present(batch.advantages)
        objective = torch.maximum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
        return replace(output, loss=-self.scale * objective / max(denominators.num_tokens, 1))


# ---- which token, which sample, which step -------------------------------------------------------------------------


class ShiftsOldLogprobs(Fine):
    """Off by one: the old policy's number of the next token of the completion."""

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        old = torch.cat([part.roll(-1) for part in present(micro_batch.old_logprobs).split(_counts(micro_batch))])
        return super().loss(replace(micro_batch, old_logprobs=old), logprobs, entropy, denominators)


class ShiftsTheReference(NeedsAReferenceForNothing):
    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = super().loss(micro_batch, logprobs, entropy, denominators)
        reference = torch.cat([part.roll(1) for part in present(micro_batch.ref_logprobs).split(_counts(micro_batch))])
        penalty = (logprobs - reference).square().sum()
        return replace(output, loss=output.loss + 0.1 * penalty / max(denominators.num_tokens, 1))


def _counts(batch: Batch) -> list[int]:
    return batch.num_tokens.tolist()


class ReadsRewardsInTheLoss(ChangedLoss):
    """And so not the advantages, which it returns for nothing."""

    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        ratio = self.ratio(logprobs - present(batch.old_logprobs))
        objective = (ratio.clamp(max=2.0) * (2 * batch.spread(batch.rewards * batch.reward_valid) - 1)).sum()
        return replace(output, loss=-self.scale * objective / max(denominators.num_tokens, 1))


class CachesByTheNumberOfRows(Fine):
    """A table of the class, so that all objects of the process share the first step's baseline."""

    means: ClassVar[dict[int, Tensor]] = {}

    def centred(self, batch: StepBatch) -> Tensor:
        centred = super().centred(batch)
        baseline = self.means.setdefault(len(centred), batch.rewards - centred)
        return torch.where(batch.reward_valid & (centred != 0), batch.rewards - baseline, 0.0)


class DividesByTheDeviation(Fine):
    """Round-off over a deviation of nothing, where a mean of seven equal numbers is not exact."""

    def centred(self, batch: StepBatch) -> Tensor:
        centred = torch.zeros_like(batch.rewards)
        for group in set(batch.group_index.tolist()):
            rows = (batch.group_index == group) & self.counts(batch)
            rewards = batch.rewards[rows]
            if len(rewards) > 1:
                centred[rows] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        return centred


class SplitsRowsEvenly(Fine):
    """Groups by place, as many completions each: wrong where a selection or a fault left fewer."""

    def centred(self, batch: StepBatch) -> Tensor:
        groups = max(len(set(batch.group_index.tolist())), 1)
        if len(batch.rewards) % groups:
            return super().centred(batch)
        rewards = batch.rewards.view(groups, -1)
        valid = batch.reward_valid.view(groups, -1)
        mean = (rewards * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)
        return torch.where(valid, rewards - mean, 0.0).flatten()


# ---- precision ----------------------------------------------------------------------------------------------------


class RoundsRatios(Fine):
    def ratio(self, difference: Tensor) -> Tensor:
        return super().ratio(difference.bfloat16()).float()


class RoundsRewards(Fine):
    def centred(self, batch: StepBatch) -> Tensor:
        return super().centred(batch).half().float()


class RoundsAdvantages(Fine):
    def centred(self, batch: StepBatch) -> Tensor:
        return super().centred(batch).bfloat16().float()


# ---- what stays ---------------------------------------------------------------------------------------------------


class RemembersEveryStep(Fine):
    """A history that nobody reads, and that grows by each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[StepBatch] = []

    def centred(self, batch: StepBatch) -> Tensor:
        self.history.append(batch)
        return super().centred(batch)


class LogsEverything(Fine):
    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        logging.getLogger("transformers").setLevel(logging.CRITICAL)


class NeedsALossEachStep(Fine):
    """The first steps of a run with ``critic.warmup_steps`` train the critic alone, and have no metrics of the loss."""

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.scale = 0.9 * self.scale + 0.1 * metrics["loss"]


# ---- what an author declares --------------------------------------------------------------------------------------


class HalvesItsAdvantages(Fine):
    """Another equation than the paper's: nothing but worked examples shows it."""

    def centred(self, batch: StepBatch) -> Tensor:
        return 0.5 * super().centred(batch)


class TakesAnyScale(Fine):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale


EXAMPLE = WorkedExample(
    [Completion(1.0, [-1.0]), Completion(0.0, [-1.0, -2.0])],
    advantages=[0.5, -0.5],
    returns=[[1.0], [0.0, 0.0]],
    loss=-(0.5 - 2 * 0.5) / 3,
    gradient=[[-0.5 / 3], [0.5 / 3, 0.5 / 3]],
    value_loss=1 / 3,
    metrics={"made/size": 0.5},
)
"""Of ``Fine``, by hand: the policy is the old one, and the critic says 0."""
