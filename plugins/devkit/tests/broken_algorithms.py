"""The algorithm that others change by one mistake each, for ``test_algorithm_sabotage.py``, and the checks of all."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from rlplug_devkit import AlgorithmConformance
from torch import Tensor

from rlplug.interfaces import Advantages, Algorithm, Denominators, LossOutput, Needs
from rlplug.types import Batch, StepBatch

NUM_THREADS = torch.get_num_threads()
UMASK = os.umask(0)
os.umask(UMASK)


def present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


class Fine(Algorithm):
    """Rewards less their group's mean, a clipped ratio, a critic, and a scale that follows the mean of the ratio."""

    def __init__(self) -> None:
        self.scale = 1.0

    @property
    def needs(self) -> Needs:
        return Needs(groups=True, critic=True)

    def advantages(self, batch: StepBatch) -> Advantages:
        centred = self.centred(batch)
        values = present(batch.tokens.values)
        metrics = {"made/size": batch.step.mean(centred.abs()), "made/value": batch.step.mean(values)}
        return Advantages(centred, returns=batch.spread(batch.rewards), metrics=metrics)

    def centred(self, batch: StepBatch) -> Tensor:
        centred = torch.zeros_like(batch.rewards)
        for group in set(batch.group_index.tolist()):
            rows = (batch.group_index == group) & self.counts(batch)
            rewards = batch.rewards[rows]
            if len(rewards) > 1 and rewards.max() > rewards.min():
                centred[rows] = rewards - rewards.mean()
        return centred

    def counts(self, batch: StepBatch) -> Tensor:
        return batch.reward_valid

    def ratio(self, difference: Tensor) -> Tensor:
        return difference.clamp(-20, 20).exp()

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        assert micro_batch.advantages is not None
        assert micro_batch.old_logprobs is not None
        ratio = self.ratio(logprobs - micro_batch.old_logprobs)
        objective = (ratio.clamp(max=2.0) * micro_batch.advantages).sum()
        mean = ratio.detach().sum() / max(denominators.num_tokens, 1)
        return LossOutput(-self.scale * objective / max(denominators.num_tokens, 1), {"made/ratio": mean})

    def value_loss(self, micro_batch: Batch, values: Tensor, denominators: Denominators) -> LossOutput:
        assert micro_batch.returns is not None
        squares = (values - micro_batch.returns).square().sum()
        return LossOutput(squares / max(denominators.num_tokens, 1))

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.scale = 0.9 * self.scale + 0.1 * metrics["made/ratio"]

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = state["scale"]


class ChangedLoss(Fine):
    """Base of those that change what ``Fine.loss`` returns."""

    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        raise NotImplementedError

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = super().loss(micro_batch, logprobs, entropy, denominators)
        return self.changed(output, micro_batch, logprobs, denominators)


class AlgorithmTests(AlgorithmConformance):
    algorithm: ClassVar[type[Algorithm]]

    def make_algorithm(self) -> Algorithm:
        return self.algorithm()

    @classmethod
    def teardown_class(cls) -> None:
        """Undo what mistakes left in the process, which is that of all tests."""
        torch.set_num_threads(NUM_THREADS)
        socket.setdefaulttimeout(None)
        os.umask(UMASK)
