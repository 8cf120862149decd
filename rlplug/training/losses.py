"""What an optimizer step minimises: the policy's loss, the critic's, or both on one trunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from rlplug.interfaces.algorithm import Algorithm, Denominators, LossOutput
from rlplug.models.forward import PolicyOutput, critic_forward, head_values, policy_forward
from rlplug.models.lm_head import EntropyMode
from rlplug.models.packing import PackedMicroBatch
from rlplug.ops import masked_sum
from rlplug.types import SamplingParams


@dataclass(frozen=True)
class TrainableModel:
    """A sharded network with an optimizer of its own."""

    name: Literal["policy", "critic"]
    module: nn.Module
    optimizer: Any
    scheduler: Any
    """Learning-rate scheduler, or ``None``."""
    max_grad_norm: float | None


@dataclass(frozen=True)
class Share(LossOutput):
    """A micro-batch's share of an objective."""

    sampled_logprobs: Tensor | None = None
    """float32 [B, T], no gradient: the policy's; ``None`` when it did not run"""

    def detach(self) -> Share:
        """Return the same without the graph."""

        def detached(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.detach() for name, value in metrics.items()}

        return replace(
            self,
            loss=self.loss.detach(),
            metrics=detached(self.metrics),
            maxima=detached(self.maxima),
            minima=detached(self.minima),
        )


class Objective(Protocol):
    """A loss and the networks that its gradient moves."""

    @property
    def trainees(self) -> Sequence[TrainableModel]:
        """Those whose optimizers step."""

    @property
    def num_epochs(self) -> int | None:
        """Passes over a step's batch; ``None`` for the batch plan's."""

    def share(self, rows: PackedMicroBatch, denominators: Denominators) -> Share:
        """Return the share of a micro-batch, on the device. Metrics hold the losses by name."""


@dataclass(frozen=True)
class PolicyLoss:
    """The algorithm's loss of the policy."""

    policy: TrainableModel
    algorithm: Algorithm
    sampling: SamplingParams
    hook: Any
    num_epochs: int | None = None

    @property
    def trainees(self) -> Sequence[TrainableModel]:
        return (self.policy,)

    def share(self, rows: PackedMicroBatch, denominators: Denominators) -> Share:
        return self.share_of(rows, self.forward(rows), denominators)

    def forward(self, rows: PackedMicroBatch) -> PolicyOutput:
        entropy: EntropyMode = "gradient" if self.algorithm.needs.entropy_gradient else "value"
        return policy_forward(self.policy.module, rows, self.sampling, entropy)

    def share_of(self, rows: PackedMicroBatch, output: PolicyOutput, denominators: Denominators) -> Share:
        batch = rows.batch
        if batch.old_logprobs is None:
            batch = batch.replace(old_logprobs=output.logprobs.detach())
        result: LossOutput = self.hook.rlplug_compute_loss(
            algorithm=self.algorithm,
            micro_batch=batch,
            logprobs=output.logprobs,
            entropy=output.entropy,
            denominators=denominators,
        )
        entropy = masked_sum(output.entropy.detach(), batch.response_mask) / max(denominators.num_tokens, 1)
        metrics = {"loss": result.loss, "policy/entropy": entropy, **result.metrics}
        return Share(result.loss, metrics, result.maxima, result.minima, output.sampled_logprobs)


@dataclass(frozen=True)
class CriticLoss:
    """The algorithm's loss of a critic with a trunk of its own."""

    critic: TrainableModel
    algorithm: Algorithm
    num_epochs: int | None

    @property
    def trainees(self) -> Sequence[TrainableModel]:
        return (self.critic,)

    def share(self, rows: PackedMicroBatch, denominators: Denominators) -> Share:
        return value_share(self.algorithm, rows, critic_forward(self.critic.module, rows), denominators)


@dataclass(frozen=True)
class SharedTrunkLoss:
    """Both losses in one pass: the policy's and, times a coefficient, that of a value head on its trunk."""

    policy: PolicyLoss
    head: TrainableModel
    value_coefficient: float
    num_epochs: int | None = None

    @property
    def trainees(self) -> Sequence[TrainableModel]:
        return (self.policy.policy, self.head)

    def share(self, rows: PackedMicroBatch, denominators: Denominators) -> Share:
        output = self.policy.forward(rows)
        policy = self.policy.share_of(rows, output, denominators)
        values = head_values(self.head.module, output, rows)
        value = value_share(self.policy.algorithm, rows, values, denominators)
        return replace(
            policy,
            loss=policy.loss + self.value_coefficient * value.loss,
            metrics=policy.metrics | value.metrics,
            maxima=policy.maxima | value.maxima,
            minima=policy.minima | value.minima,
        )


@dataclass(frozen=True)
class ValueHeadLoss:
    """The value head alone, on the policy's trunk as it is: the warm-up of a critic that shares it."""

    policy: PolicyLoss
    head: TrainableModel
    num_epochs: int | None = None

    @property
    def trainees(self) -> Sequence[TrainableModel]:
        return (self.head,)

    def share(self, rows: PackedMicroBatch, denominators: Denominators) -> Share:
        with torch.no_grad():
            output = policy_forward(self.policy.policy.module, rows, self.policy.sampling, "none")
        return value_share(self.policy.algorithm, rows, head_values(self.head.module, output, rows), denominators)


def value_share(algorithm: Algorithm, rows: PackedMicroBatch, values: Tensor, denominators: Denominators) -> Share:
    """Return the share of the critic's loss."""
    result = algorithm.value_loss(rows.batch, values, denominators)
    return Share(result.loss, {"critic/loss": result.loss, **result.metrics}, result.maxima, result.minima)
