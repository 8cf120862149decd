"""The policy's loss as a sum over tokens or sequences, for passes that run before the step's denominators are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from rlplug.interfaces.algorithm import Denominators, LossDivisor
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.models.forward import PolicyOutput
from rlplug.models.packing import PackedMicroBatch
from rlplug.training.actor_critic import TrainableModel
from rlplug.training.losses import MicroBatchLoss, PolicyLoss

SUMS: Final = Denominators(num_tokens=1, num_sequences=1, num_routed=1)
"""Denominators that leave losses and metrics undivided."""
OTHERS: Final = Denominators(num_tokens=2, num_sequences=3, num_routed=5)
"""Denominators by which the divisor of a loss shows."""


@dataclass(frozen=True)
class UndividedLoss:
    """The policy's loss as a sum, which is divided after the last backward pass."""

    policy: PolicyLoss
    divisor: LossDivisor
    checks: bool
    """Whether to check that it is proportional to one over ``divisor``."""
    wrong: list[str] = field(default_factory=list)
    """What the checks found."""
    num_epochs: int | None = None

    @property
    def models(self) -> Sequence[TrainableModel]:
        return self.policy.models

    @property
    def call(self) -> PluginCall:
        return self.policy.call

    def compute(self, micro_batch: PackedMicroBatch, denominators: Denominators) -> MicroBatchLoss:
        output = self.policy.forward(micro_batch)
        if self.checks:
            self.wrong.extend(_wrong_divisors(self.policy, micro_batch, output, self.divisor))
        return self.policy.loss_of(micro_batch, output, denominators)


def _wrong_divisors(
    policy: PolicyLoss, micro_batch: PackedMicroBatch, output: PolicyOutput, divisor: LossDivisor
) -> Iterator[str]:
    """Return what of gradient and metrics is divided by another count than the algorithm says."""

    def loss_with(denominators: Denominators) -> tuple[dict[str, Tensor], Sequence[Tensor | None]]:
        leaves = [output.tokens.logprobs.detach(), output.entropy.detach()]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        tokens = replace(output.tokens, logprobs=leaves[0])
        found = policy.loss_of(micro_batch, replace(output, tokens=tokens, entropy=leaves[1]), denominators).output
        gradients: Any = torch.autograd.grad(found.loss, leaves, allow_unused=True)
        return {name: value.detach() for name, value in found.metrics.items()}, gradients

    (metrics, gradients), (other_metrics, other_gradients) = loss_with(SUMS), loss_with(OTHERS)
    found = {  # the loss may be round-off about 0, which its gradient is not
        f"the metric {name}": (value, other_metrics[name], divisor_of(name, divisor))
        for name, value in metrics.items()
        if name != "loss"
    }
    for name, gradient, other in zip(("logprobs", "entropy"), gradients, other_gradients, strict=True):
        if gradient is not None and other is not None:
            found[f"the loss's gradient by {name}"] = (gradient, other, divisor)
    for name, (value, other, count) in found.items():
        scaled = other.float() * getattr(OTHERS, count)
        if not torch.allclose(value.float(), scaled, 1e-3, 1e-6 * max(1.0, float(value.abs().max())), equal_nan=True):
            yield f"{name} is not divided by {count} alone"


def divisor_of(metric: str, divisor: LossDivisor) -> str:
    """Return the field of :class:`Denominators` that divides a metric of the policy's loss."""
    return {"loss": divisor, "router/differ": "num_routed"}.get(metric, "num_tokens")
