"""The models of a run, their optimizers, and the update that trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from rlplug.interfaces.optimization import Effect, Optimization
from rlplug.models.build import Models, build_policy, build_reference
from rlplug.plugin_manager import plugins
from rlplug.setup.checks.trainer import check_trainer
from rlplug.training.actor_critic import ActorCritic, TrainableModel
from rlplug.training.passes import MicroBatchRunner
from rlplug.training.step_training import StepTraining
from rlplug.training.update import PolicyUpdate, policy_losses
from rlplug.types import StepBatch
from rlplug.weight_sync.manifest import adapters_line

if TYPE_CHECKING:
    from rlplug.config import RunConfig
    from rlplug.distributed.offload import Offload
    from rlplug.interfaces.token_log import TokenLog
    from rlplug.rollout.source import RolloutSource
    from rlplug.setup.planning import RunParts
    from rlplug.types import Sample


def build_models(parts: RunParts, built: Models | None) -> Models:
    """Return the models: the policy alone, and with a plan those that training needs beside it.

    Args:
        parts: What the run is made from.
        built: Models that a validation before the training has built; the missing ones are added.
    """
    config, strategy, plan = parts.config, parts.strategy, parts.plan
    trainer = config.model_trainer
    if plan is None:
        check_trainer(config, strategy.mesh_sizes(strategy.world_size), policy_alone=True)
    optimizations = config.optimizations if plan is None else plan.optimizations
    models = built or _policy_models(parts, optimizations)
    if plan is None:
        return models
    if config.reference_is_policy and models.reference is None:
        from rlplug.models.lora.adapters import InitialPolicy

        is_base = config.lora is None or config.lora.path is None
        models.set_reference(InitialPolicy(models.policy, is_base))
        models.effects += [Effect(f"reference: the policy {'without its' if is_base else 'with its first'} adapters")]
    if config.algorithm.needs.reference_policy and models.reference is None:
        reference, effects = build_reference(config.reference, config.policy, optimizations, strategy, trainer)
        models.set_reference(reference)
        models.effects += effects
    if config.critic is not None and models.critic is None:
        from rlplug.models.critic.network import build_critic

        models.critic, effects = build_critic(
            config.critic, models.policy, config.policy, optimizations, strategy, trainer
        )
        models.effects += effects
    return models


def _policy_models(parts: RunParts, optimizations: Sequence[Optimization]) -> Models:
    """Return the policy, with what a person should know of how it was made."""
    config, inputs, strategy, plan = parts.config, parts.inputs, parts.strategy, parts.plan
    policy, effects = build_policy(
        config.policy, optimizations, strategy, config.model_trainer, config.router_replay, config.lora
    )
    models = Models(policy)
    models.effects += effects
    models.effects += () if plan is None or plan.memory is None else plan.memory.left_out
    if inputs.spec.fp8 is not None:
        from rlplug.weight_sync.fp8_layers import describe

        models.effects += [Effect(describe(inputs.spec.fp8))]
    if inputs.spec.adapters is not None:
        models.effects += [Effect(adapters_line(inputs.spec, type(config.engine).__name__))]
    if not all(weight.requires_grad for weight in policy.parameters()):
        from rlplug.training.trainer_record import adapter_record

        models.adapters = adapter_record(policy, strategy.gather)
    return models


def make_optimizers(config: RunConfig, models: Models) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and their schedulers (``None`` for a constant rate): the policy's, then the critic's."""
    trained = [(name, weight) for name, weight in models.policy.named_parameters() if weight.requires_grad]
    optimizers = [config.optimizer(trained)]
    make_schedulers = [config.lr_scheduler]
    if config.critic is not None and models.critic is not None:
        optimizers.append(config.critic.make_optimizer(models.critic.named_parameters()))
        make_schedulers.append(config.critic.lr_scheduler)
    pairs = zip(make_schedulers, optimizers, strict=True)
    return optimizers, [None if make is None else make(optimizer) for make, optimizer in pairs]


def make_update(
    parts: RunParts,
    models: Models,
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    backward: Callable[[Any], None],
    token_log: TokenLog | None,
) -> PolicyUpdate:
    """Join models with their optimizers and schedulers, the policy's first, into what updates them."""
    config, plan = parts.config, parts.plan
    assert plan is not None, "training is planned"
    policy = TrainableModel("policy", models.policy, optimizers[0], schedulers[0], config.limits.max_grad_norm)
    critic, losses_of = None, policy_losses
    if config.critic is not None:
        from rlplug.training.critic_losses import losses_with_critic as losses_of

        assert models.critic is not None
        critic = TrainableModel("critic", models.critic, optimizers[1], schedulers[1], config.critic.max_grad_norm)
    trained = ActorCritic(
        policy=policy,
        critic=critic,
        critic_config=config.critic,
        reference=models.reference,
        algorithm=config.algorithm,
        sampling=config.sampling,
        loss_hook=plugins().hook.rlplug_compute_loss if plugins().wraps("rlplug_compute_loss") else None,
    )
    return PolicyUpdate(
        losses=partial(losses_of, trained),
        models=trained,
        runner=MicroBatchRunner(plan.batch, parts.strategy, token_log),
        backward=backward,
        skip_nonfinite=config.limits.on_nonfinite == "skip",
        seed=config.seed,
    )


def make_step_training(
    parts: RunParts,
    source: RolloutSource,
    update: PolicyUpdate,
    offload: Offload,
    phase: Callable[[str], AbstractContextManager[None]],
) -> StepTraining:
    """Return what trains on the groups of a step: together, or as the source's do."""
    spec, strategy = parts.inputs.spec, parts.strategy
    no_experts = None if spec.routers is None else spec.routers.empty(0)

    def make_batch(samples: Sequence[Sample]) -> StepBatch:
        return StepBatch.from_samples(samples, strategy.statistics, no_experts)

    made: StepTraining = (source.make_step_training or StepTraining)(update, offload, make_batch, phase)
    return made
