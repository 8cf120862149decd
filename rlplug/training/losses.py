"""The losses that optimizer steps minimise: the policy's, the critic's, or both on one trunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from rlplug.interfaces.algorithm import Denominators, LossOutput
from rlplug.interfaces.checks.algorithms import check_loss, check_per_token
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.process_state import watched
from rlplug.models.forward import PolicyOutput, critic_forward, policy_forward, value_head_forward
from rlplug.models.lm_head import EntropyMode, TokenLogprobs
from rlplug.models.packing import PackedMicroBatch
from rlplug.ops import masked_sum
from rlplug.training.actor_critic import ActorCritic, TrainableModel


@dataclass(frozen=True)
class MicroBatchLoss:
    """A micro-batch's share of a loss."""

    output: LossOutput
    """Metrics hold the losses by name."""
    tokens: TokenLogprobs | None = None
    """float32 [B, T], of the policy; ``None`` when it did not run"""
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    """Bool or float [B, T], detached: ``entropy``, and what the algorithm says of single tokens."""


class TrainingLoss(Protocol):
    """A loss, and the models that its gradient moves."""

    @property
    def models(self) -> Sequence[TrainableModel]:
        """Models whose optimizers step."""

    @property
    def num_epochs(self) -> int | None:
        """Passes over a step's batch; ``None`` for the batch plan's."""

    @property
    def call(self) -> PluginCall:
        """The algorithm's call that gives it, for messages."""

    def compute(self, micro_batch: PackedMicroBatch, denominators: Denominators) -> MicroBatchLoss:
        """Return the share of a micro-batch, on the device."""


def step_losses(models: ActorCritic, step: int) -> list[TrainingLoss]:
    """Return the losses that ``step``, from 1, minimises, in order."""
    policy = PolicyLoss(models)
    if models.critic is None:
        return [policy]
    assert models.critic_config is not None
    if models.shares_trunk:
        if models.policy_trains(step):
            return [SharedTrunkLoss(policy, models.critic, models.critic_config.value_coefficient)]
        return [ValueHeadLoss(models, models.critic)]
    critic = CriticLoss(models, models.critic, models.critic_config.num_epochs)
    return [policy, critic] if models.policy_trains(step) else [critic]


@dataclass(frozen=True)
class PolicyLoss:
    """The algorithm's loss of the policy."""

    actor_critic: ActorCritic
    num_epochs: int | None = None

    @property
    def models(self) -> Sequence[TrainableModel]:
        return (self.actor_critic.policy,)

    @property
    def call(self) -> PluginCall:
        return PluginCall(self.actor_critic.algorithm, "loss")

    def compute(self, micro_batch: PackedMicroBatch, denominators: Denominators) -> MicroBatchLoss:
        return self.loss_of(micro_batch, self.forward(micro_batch), denominators)

    def forward(self, micro_batch: PackedMicroBatch) -> PolicyOutput:
        run = self.actor_critic
        entropy: EntropyMode = "gradient" if run.algorithm.needs.entropy_gradient else "value"
        return policy_forward(run.policy.module, micro_batch, run.sampling, entropy)

    def loss_of(
        self, micro_batch: PackedMicroBatch, output: PolicyOutput, denominators: Denominators
    ) -> MicroBatchLoss:
        """Return the share of a micro-batch from what the policy computed for it."""
        batch = micro_batch.batch
        if batch.old_logprobs is None:  # exactly on-policy: the current logprobs are the old ones
            batch = batch.replace(old_logprobs=output.tokens.logprobs.detach())
        result: LossOutput = self.actor_critic.hook.rlplug_compute_loss(  # Algorithm.loss, unless a plugin wraps it
            algorithm=self.actor_critic.algorithm,
            micro_batch=batch,
            logprobs=output.tokens.logprobs,
            entropy=output.entropy,
            denominators=denominators,
        )
        entropy = masked_sum(output.entropy.detach(), batch.response_mask) / max(denominators.num_tokens, 1)
        metrics = {"loss": result.loss, "policy/entropy": entropy, **result.metrics}
        if output.num_differing is not None:
            metrics["router/differ"] = output.num_differing / max(denominators.num_routed, 1)
        per_token = {"entropy": output.entropy.detach(), **check_per_token(self.call, result, output.tokens.logprobs)}
        return MicroBatchLoss(LossOutput(result.loss, metrics, result.maxima, result.minima), output.tokens, per_token)


@dataclass(frozen=True)
class CriticLoss:
    """The algorithm's loss of a critic with a trunk of its own."""

    actor_critic: ActorCritic
    critic: TrainableModel
    num_epochs: int | None

    @property
    def models(self) -> Sequence[TrainableModel]:
        return (self.critic,)

    @property
    def call(self) -> PluginCall:
        return PluginCall(self.actor_critic.algorithm, "value_loss")

    def compute(self, micro_batch: PackedMicroBatch, denominators: Denominators) -> MicroBatchLoss:
        values = critic_forward(self.critic.module, micro_batch)
        return MicroBatchLoss(value_loss(self.actor_critic, micro_batch, values, denominators))


@dataclass(frozen=True)
class SharedTrunkLoss:
    """Both losses in one pass: the policy's plus a coefficient times that of a value head on its trunk."""

    policy: PolicyLoss
    head: TrainableModel
    value_coefficient: float
    num_epochs: int | None = None

    @property
    def models(self) -> Sequence[TrainableModel]:
        return (*self.policy.models, self.head)

    @property
    def call(self) -> PluginCall:
        return PluginCall(self.policy.actor_critic.algorithm, "loss")

    def compute(self, micro_batch: PackedMicroBatch, denominators: Denominators) -> MicroBatchLoss:
        forward = self.policy.forward(micro_batch)
        share = self.policy.loss_of(micro_batch, forward, denominators)
        policy = share.output
        values = value_head_forward(self.head.module, forward, micro_batch)
        value = value_loss(self.policy.actor_critic, micro_batch, values, denominators)
        both = LossOutput(
            loss=policy.loss + self.value_coefficient * value.loss,
            metrics=policy.metrics | value.metrics,
            maxima=policy.maxima | value.maxima,
            minima=policy.minima | value.minima,
        )
        return replace(share, output=both)


@dataclass(frozen=True)
class ValueHeadLoss:
    """The value head's loss on the policy's trunk as it is: the warm-up of a critic that shares the trunk."""

    actor_critic: ActorCritic
    head: TrainableModel
    num_epochs: int | None = None

    @property
    def models(self) -> Sequence[TrainableModel]:
        return (self.head,)

    @property
    def call(self) -> PluginCall:
        return PluginCall(self.actor_critic.algorithm, "value_loss")

    def compute(self, micro_batch: PackedMicroBatch, denominators: Denominators) -> MicroBatchLoss:
        run = self.actor_critic
        with torch.no_grad():
            output = policy_forward(run.policy.module, micro_batch, run.sampling, "none")
        values = value_head_forward(self.head.module, output, micro_batch)
        return MicroBatchLoss(value_loss(run, micro_batch, values, denominators))


def value_loss(
    actor_critic: ActorCritic, micro_batch: PackedMicroBatch, values: Tensor, denominators: Denominators
) -> LossOutput:
    """Return the share of the critic's loss, with the loss among its metrics."""
    call = PluginCall(actor_critic.algorithm, "value_loss")
    with watched(call):
        result = check_loss(call, actor_critic.algorithm.value_loss(micro_batch.batch, values, denominators))
    return LossOutput(result.loss, {"critic/loss": result.loss, **result.metrics}, result.maxima, result.minima)
