"""The policy's loss as a sum over tokens or sequences, for passes that run before the step's denominators are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlplug.interfaces.algorithm import Denominators, LossDivisor
from rlplug.models.forward import PolicyOutput
from rlplug.models.packing import PackedMicroBatch
from rlplug.training.actor_critic import ActorCritic
from rlplug.training.update import MicroBatchLoss, forward_policy, policy_loss

SUMS: Final = Denominators(num_tokens=1, num_sequences=1, num_routed=1)
"""Denominators that leave losses and metrics undivided."""
OTHERS: Final = Denominators(num_tokens=2, num_sequences=3, num_routed=5)
"""Denominators by which the divisor of a loss shows."""


def undivided_loss(
    models: ActorCritic,
    divisor: LossDivisor,
    wrong: list[str],
    micro_batch: PackedMicroBatch,
    denominators: Denominators,
) -> MicroBatchLoss:
    """Return the policy's loss, after a check that it is proportional to one over ``divisor``.

    Args:
        models: The models, and the algorithm.
        divisor: Count that divides the loss, as the algorithm says.
        wrong: Gets what is divided by another one.
        micro_batch: Tokens on the device.
        denominators: ``SUMS``.
    """
    output = forward_policy(models, micro_batch)
    if len(micro_batch.batch.token_ids):  # of no tokens all is 0
        wrong.extend(_wrong_divisors(models, micro_batch, output, divisor))
    return policy_loss(models, micro_batch, denominators, output)


def _wrong_divisors(
    models: ActorCritic, micro_batch: PackedMicroBatch, output: PolicyOutput, divisor: LossDivisor
) -> Iterator[str]:
    """Return what of gradient and metrics is divided by another count than the algorithm says."""

    def loss_with(denominators: Denominators) -> tuple[dict[str, Tensor], Sequence[Tensor | None]]:
        leaves = [output.tokens.logprobs.detach(), output.entropy.detach()]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        tokens = replace(output.tokens, logprobs=leaves[0])
        found = policy_loss(models, micro_batch, denominators, replace(output, tokens=tokens, entropy=leaves[1])).output
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
