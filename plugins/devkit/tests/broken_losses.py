"""Algorithms whose losses have a mistake each."""

from __future__ import annotations

from dataclasses import replace

import torch
from broken_algorithms import ChangedLoss, Fine
from torch import Tensor

from rlplug.interfaces import Algorithm, Denominators, LossOutput
from rlplug.types import Batch


class RaisesInLoss(Fine):
    def ratio(self, difference: Tensor) -> Tensor:
        raise RuntimeError("a shape")


class ForgetsTheValueLoss(Fine):
    def value_loss(self, micro_batch: Batch, values: Tensor, denominators: Denominators) -> LossOutput:
        return Algorithm.value_loss(self, micro_batch, values, denominators)


class DetachesLogprobs(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, loss=output.loss.detach())


class ReturnsTheLossOfTokens(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, loss=output.loss.expand(2))


class ReturnsADoubleLoss(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, loss=output.loss.double())


class KeepsTheGraphInMetrics(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, metrics={**output.metrics, "made/loss": output.loss})


class ZeroesAdvantagesInPlace(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        assert batch.advantages is not None
        batch.advantages.data.clamp_(-0.1, 0.1)
        return output


class DividesByItsOwnTokens(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        own = batch.num_tokens.sum().clamp(min=1)
        return replace(output, loss=output.loss * max(denominators.num_tokens, 1) / own)


class NormalisesInTheMicroBatch(ChangedLoss):
    """Advantages are divided by their largest in the micro-batch."""

    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        assert batch.advantages is not None
        largest = torch.cat([batch.advantages.abs(), torch.tensor([1e-3])]).max()
        return replace(output, loss=output.loss / largest)


class AddsAConstant(ChangedLoss):
    """A term of the step, as large in each row that is there: halves with the denominators, and adds up over rows."""

    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, loss=output.loss + batch.num_sequences / max(denominators.num_tokens, 1))


class ClampsAfterExp(Fine):
    def ratio(self, difference: Tensor) -> Tensor:
        return difference.exp()


class HasTheWrongSign(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, loss=-output.loss)
