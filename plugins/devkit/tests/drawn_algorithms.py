"""Algorithms of a draw that the kit did not know, one mistake each, and a correct one of unusual style."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from broken_algorithms import Fine, present
from torch import Tensor

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
