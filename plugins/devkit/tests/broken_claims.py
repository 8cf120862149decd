"""Algorithms that keep, claim or need the wrong thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from broken_algorithms import ChangedLoss, Fine, present
from torch import Tensor

from rlplug.interfaces import Advantages, Denominators, LossOutput, Needs, RunInfo
from rlplug.types import Batch, Sample, StepBatch

# ---- state ---------------------------------------------------------------------------------------------------------


class DrawsGlobally(Fine):
    def centred(self, batch: StepBatch) -> Tensor:
        torch.rand(1)
        return super().centred(batch)


class KeepsATensor(Fine):
    def state_dict(self) -> dict[str, Any]:
        return {"scale": torch.tensor(self.scale)}


class ForgetsItsScale(Fine):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class LoadsTheDefault(Fine):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = 1.0


class SelectsByAnUnsavedStep(Fine):
    steps = 0

    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        return group if self.steps < 4 else group[:2]

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        self.steps += 1


class RaisesAfterAStep(Fine):
    def after_step(self, metrics: Mapping[str, float]) -> None:
        raise KeyError("kl")


class WritesIntoMetrics(Fine):
    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        metrics.pop("step")  # type: ignore[attr-defined]


class ChangesAfterAHundredSteps(Fine):
    """State that matters late and is not saved."""

    steps = 0

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        self.steps += 1
        if self.steps > 100:
            self.scale = 0.0


class HandsOutItsList(Fine):
    """The list in a checkpoint grows with the run."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        self.history.append(metrics["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "history": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.history = state["scale"], list(state["history"])


# ---- claims --------------------------------------------------------------------------------------------------------


class NeedsMoreLater(Fine):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, reference_policy=self.scale != 1.0)


class ReadsTheReferenceIfThere(ChangedLoss):
    """A penalty that is never there, because nothing asks for the reference."""

    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        if batch.ref_logprobs is None:
            return output
        penalty = (logprobs - batch.ref_logprobs).square().sum() / max(denominators.num_tokens, 1)
        return replace(output, loss=output.loss + penalty)


class AddsAnEntropyBonus(Fine):
    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = super().loss(micro_batch, logprobs, entropy, denominators)
        return replace(output, loss=output.loss - 0.01 * entropy.sum() / max(denominators.num_tokens, 1))


class NeedsAReferenceForNothing(Fine):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, reference_policy=True)


class NeedsOldLogprobsForNothing(Fine):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, old_logprobs=True)


class NeedsEntropyForNothing(Fine):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, entropy_gradient=True)


class NeverAsksItsCritic(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        result = super().advantages(batch)
        return replace(result, metrics={"made/size": result.metrics["made/size"]})


class RefusesNoRun(Fine):
    """A group of one has no baseline, and ``needs.groups`` does not say so."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, groups=False)


class LeavesOutTheLastToken(Fine):
    """Off by one: sums end a token early."""

    def ratio(self, difference: Tensor) -> Tensor:
        return super().ratio(difference)

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        ends = micro_batch.num_tokens.cumsum(0)[micro_batch.num_tokens > 0] - 1
        is_last = torch.zeros_like(logprobs, dtype=torch.bool).index_fill(0, ends, value=True)
        return super().loss(micro_batch, torch.where(is_last, logprobs.detach(), logprobs), entropy, denominators)


class FreezesItsCritic(Fine):
    """All values are detached but those of completions of a single token."""

    def value_loss(self, micro_batch: Batch, values: Tensor, denominators: Denominators) -> LossOutput:
        is_alone = micro_batch.num_tokens[micro_batch.sequence_index] == 1
        return super().value_loss(micro_batch, torch.where(is_alone, values, values.detach()), denominators)


class DetachesItsPenalty(NeedsAReferenceForNothing):
    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = super().loss(micro_batch, logprobs, entropy, denominators)
        penalty = (logprobs.detach() - present(micro_batch.ref_logprobs)).square().sum()
        return replace(output, loss=output.loss + 0.1 * penalty / max(denominators.num_tokens, 1))


class Streamed(Fine):
    """Needs no critic, and its groups stand alone."""

    @property
    def needs(self) -> Needs:
        return Needs(groups=True)

    @property
    def streamed_divisor(self) -> Literal["num_tokens", "num_sequences"] | None:
        return "num_tokens"

    def advantages(self, batch: StepBatch) -> Advantages:
        centred = self.centred(batch)
        return Advantages(centred, metrics={"made/size": batch.step.mean(centred.abs())})


class StreamsACritic(Fine):
    @property
    def streamed_divisor(self) -> Literal["num_tokens", "num_sequences"] | None:
        return "num_tokens"


class StreamsWhatIsNormalised(Streamed):
    def advantages(self, batch: StepBatch) -> Advantages:
        result = super().advantages(batch)
        assert result.of_sequences is not None
        deviation = batch.step.moments(result.of_sequences, batch.reward_valid).std
        return replace(result, of_sequences=result.of_sequences / (deviation + 1e-3))


class StreamsByTwoCounts(Streamed):
    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = super().loss(micro_batch, logprobs, entropy, denominators)
        return replace(output, loss=output.loss + 0.07 * logprobs.sum() / max(denominators.num_sequences, 1))


class AssertsInSetup(Fine):
    def setup(self, run: RunInfo) -> None:
        assert run.group_size <= 16, "too large"
