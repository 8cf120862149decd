"""Parts that go wrong, named by their import path in the tests' command lines."""

import time

import torch
from rlplug_algos.grpo import GRPO

from rlplug.interfaces import EngineCapabilities, LossOutput
from rlplug.rollout.hf import HFRollout


def raises(completion: str) -> float:
    raise KeyError("no such unit test")


def hangs(completion: str) -> float:
    time.sleep(3600)
    return 0.0


def not_a_number(completion: str) -> float:
    return float("nan")


class SecondLossIsNaN(GRPO):
    """GRPO, but for its second loss."""

    num_losses = 0

    def loss(self, *arguments, **keywords) -> LossOutput:  # type: ignore[no-untyped-def]
        result = super().loss(*arguments, **keywords)
        self.num_losses += 1
        return LossOutput(result.loss * torch.nan, result.metrics) if self.num_losses == 2 else result


class Silent(HFRollout):
    """An engine that says it returns no logprobs."""

    capabilities = EngineCapabilities(logprobs=False)


class TakesWeightsOnce(HFRollout):
    """An engine that keeps the weights of its first sync."""

    has_weights = False

    def update_weights(self, buckets, version):  # type: ignore[no-untyped-def]
        kept = {name: weight.clone() for name, weight in self._model.named_parameters()}
        report = super().update_weights(buckets, version)
        if self.has_weights:
            for name, weight in self._model.named_parameters():
                weight.data.copy_(kept[name])
        self.has_weights = True
        return report
