"""The parts that generate and score in a run: its engine, its generator, its rewards and its mismatch gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from rlplug.config import RunConfig
from rlplug.data.datamodule import PromptDataModule
from rlplug.distributed.offload import Offload
from rlplug.distributed.stop_signal import StopSignal
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.errors import RLPlugError
from rlplug.interfaces.rollout import Placement, PolicySpec
from rlplug.models.build import Models
from rlplug.plugin_manager import plugins
from rlplug.rewards import RewardRunner
from rlplug.rollout.engine_driver import EngineDriver
from rlplug.rollout.generator import RolloutGenerator
from rlplug.rollout.turns.observation_tokens import ObservationTokens
from rlplug.setup.checks.engine import check_context
from rlplug.setup.inputs import RunInputs
from rlplug.training.mismatch_gate import MismatchGate, limit_of
from rlplug.weight_sync.buckets import policy_buckets


@dataclass(frozen=True)
class Run:
    """The parts that run rollouts, in training and in validation."""

    offload: Offload
    driver: EngineDriver
    generator: RolloutGenerator

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of engine, environments and offload since the last call."""
        return self.generator.pop_metrics() | self.offload.pop_metrics()


def make_rewards(config: RunConfig) -> RewardRunner:
    """Return the runner of the rewards, which adds those of the environment."""
    return RewardRunner(
        config.rewards,
        deadline_s=config.limits.reward_deadline_s,
        max_error_share=config.limits.max_reward_error_share,
        has_environment=config.environment is not None,
    )


def start_run(
    config: RunConfig,
    inputs: RunInputs,
    sleeps: bool,
    models: Models,
    data: PromptDataModule,
    strategy: RLFSDP2Strategy,
    optimizers: Sequence[Any],
    stop: StopSignal,
) -> Run:
    """Start this rank's engine, and what generates with it until ``stop`` comes."""
    assert models.policy is not None
    offload = Offload(
        config.memory.offload,
        strategy.root_device,
        trained=[model for model in (models.policy, models.critic) if model is not None],
        reference=[] if models.reference is None or config.reference_is_policy else [models.reference],
        optimizers=optimizers,
    )
    placement = Placement(strategy.root_device, strategy.global_rank, strategy.world_size)
    weights = config.model_trainer.hf_weights(models.policy)
    max_bytes = config.weight_sync.bucket_mib << 20
    driver = EngineDriver(
        engine=config.engine,
        make_buckets=partial(policy_buckets, models.policy, inputs.spec, max_bytes, weights),
        spec=inputs.spec,
        placement=placement,
        hook=plugins().hook,
        sleeps=sleeps,
        offload=offload,
        any_rank=strategy.any_rank,
        max_restarts=config.limits.max_engine_restarts,
        is_stopping=stop.poll,
        agree_to_stop=lambda: strategy.agree_to_stop(stop),
    )
    try:  # servers have said their context by now
        check_context(config.engine, inputs.spec, data.longest_prompt, config.sampling.max_new_tokens)
    except RLPlugError:
        driver.close()
        raise
    generator = make_generator(config, inputs, driver, placement, data, strategy.gather, strategy.store)
    return Run(offload, driver, generator)


def make_generator(
    config: RunConfig,
    inputs: RunInputs,
    driver: EngineDriver,
    placement: Placement,
    data: PromptDataModule,
    gather: Callable[[Any], Any] = list,
    store: Store | None = None,
) -> RolloutGenerator:
    """Return what generates with this rank's engine and the configured environment, for prompts as ``data`` has them.

    Args:
        config: Options of the run.
        inputs: Facts about policy and environment.
        driver: The driver of this rank's engine.
        placement: This rank and its device.
        data: Data module whose prompts are rendered by now.
        gather: Returns the concatenation of all ranks' lists; by default there is one rank.
        store: Store of all ranks; ``None`` for one.
    """
    return RolloutGenerator(
        driver=driver,
        spec=inputs.spec,
        placement=placement,
        tokenizer=inputs.tokenizer,
        make_environment=config.environment,
        options=config.turns,
        observations=ObservationTokens(
            inputs.tokenizer,
            chat=data.renders_chat and config.environment is not None,
            tools=data.template_tools,
            has_tools=bool(inputs.tools),
        ),
        gather=gather,
        store=store,
    )


def make_mismatch_gate(config: RunConfig, policy: PolicySpec, device: torch.device) -> MismatchGate:
    """Return what compares engine and trainer; its limit follows from the policy's dtype unless it is configured."""
    usual, limits = limit_of(policy, device, config.sampling), config.limits
    gate = usual if limits.mismatch_gate == "auto" else limits.mismatch_gate
    engine, has_old_tokens = type(config.engine).__name__, config.partial_rollout is not None
    return MismatchGate(engine, gate, usual, limits.gate_every_step, has_old_tokens, config.sampling.extra)
