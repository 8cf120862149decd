"""The critic's losses: of a critic with a trunk of its own, or of a value head on the policy's trunk (PPO, VAPO)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rlplug.interfaces.algorithm import Denominators, LossOutput
from rlplug.interfaces.checks.algorithms import check_loss
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.process_state import watched
from rlplug.models.forward import critic_forward, policy_forward, value_head_forward
from rlplug.models.packing import PackedMicroBatch
from rlplug.training.actor_critic import ActorCritic
from rlplug.training.update import MicroBatchLoss, TrainingLoss, forward_policy, policy_loss, policy_losses


def losses_with_critic(models: ActorCritic, step: int) -> list[TrainingLoss]:
    """Return the losses that ``step``, from 1, minimises in a run with a critic, in order."""
    critic, config = models.critic, models.critic_config
    assert critic is not None
    assert config is not None
    of_policy, of_critic = (PluginCall(models.algorithm, method) for method in ("loss", "value_loss"))
    trains = models.policy_trains(step)
    if models.shares_trunk and trains:
        return [TrainingLoss((models.policy, critic), of_policy, partial(shared_trunk_loss, models))]
    if models.shares_trunk:  # the head warms up on the policy's trunk as it is
        return [TrainingLoss((critic,), of_critic, partial(value_head_loss, models))]
    own = TrainingLoss((critic,), of_critic, partial(critic_loss, models), config.num_epochs, "critic_update")
    return [*policy_losses(models, step), own] if trains else [own]


def critic_loss(models: ActorCritic, micro_batch: PackedMicroBatch, denominators: Denominators) -> MicroBatchLoss:
    """Return the share of the loss of a critic with a trunk of its own."""
    assert models.critic is not None
    return MicroBatchLoss(
        _value_loss(models, micro_batch, critic_forward(models.critic.module, micro_batch), denominators)
    )


def value_head_loss(models: ActorCritic, micro_batch: PackedMicroBatch, denominators: Denominators) -> MicroBatchLoss:
    """Return the share of the value head's loss, on the policy's trunk as it is."""
    assert models.critic is not None
    with torch.no_grad():
        output = policy_forward(models.policy.module, micro_batch, models.sampling, "none")
    values = value_head_forward(models.critic.module, output, micro_batch)
    return MicroBatchLoss(_value_loss(models, micro_batch, values, denominators))


def shared_trunk_loss(models: ActorCritic, micro_batch: PackedMicroBatch, denominators: Denominators) -> MicroBatchLoss:
    """Return both losses in one pass: the policy's plus ``value_coefficient`` times that of a head on its trunk."""
    assert models.critic is not None
    assert models.critic_config is not None
    output = forward_policy(models, micro_batch)
    share = policy_loss(models, micro_batch, denominators, output)
    policy = share.output
    values = value_head_forward(models.critic.module, output, micro_batch)
    value = _value_loss(models, micro_batch, values, denominators)
    both = LossOutput(
        loss=policy.loss + models.critic_config.value_coefficient * value.loss,
        metrics={**policy.metrics, **value.metrics},
        maxima={**policy.maxima, **value.maxima},
        minima={**policy.minima, **value.minima},
    )
    return replace(share, output=both)


def _value_loss(
    models: ActorCritic, micro_batch: PackedMicroBatch, values: Tensor, denominators: Denominators
) -> LossOutput:
    """Return the share of the algorithm's loss of the critic, with the loss among its metrics."""
    call = PluginCall(models.algorithm, "value_loss")
    with watched(call):
        result = check_loss(call, models.algorithm.value_loss(micro_batch.batch, values, denominators))
    return LossOutput(result.loss, {"critic/loss": result.loss, **result.metrics}, result.maxima, result.minima)
