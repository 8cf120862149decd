"""REINFORCE with the mean of the group as its baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from rlplug.interfaces import Advantages, Algorithm, Denominators, LossOutput
from rlplug.types import Batch, StepBatch


class MeanBaseline(Algorithm):
    """A_i = r_i - mean of its group's valid rewards; L = -sum of A log pi over the tokens of the mini-batch."""

    def advantages(self, batch: StepBatch) -> Advantages:
        centred = torch.zeros_like(batch.rewards)
        for group in batch.group_index.unique():
            rows = (batch.group_index == group) & batch.reward_valid
            centred[rows] = batch.rewards[rows] - batch.rewards[rows].mean()
        magnitude = batch.step.mean(batch.spread(centred.abs()))
        return Advantages(centred, metrics={"advantages/magnitude": magnitude})

    def loss(
        self,
        micro_batch: Batch,
        logprobs: Tensor,
        entropy: Tensor,
        denominators: Denominators,
    ) -> LossOutput:
        assert micro_batch.advantages is not None
        objective = (logprobs * micro_batch.advantages).sum()
        return LossOutput(-objective / denominators.num_tokens)
