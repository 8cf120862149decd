"""A run as Lightning starts it: checks, plan, models and engine, and the parts that generate and score."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch._C._distributed_c10d import Store

from rlplug.config import RunConfig
from rlplug.data.datamodule import PromptDataModule
from rlplug.data.prompt_encoder import PromptRules
from rlplug.distributed.offload import Offload
from rlplug.distributed.stop_signal import StopSignal, end_at_once
from rlplug.distributed.strategy import RLFSDP2Strategy, require_strategy
from rlplug.errors import ConfigError, PluginError, RLPlugError, brief
from rlplug.interfaces.optimization import Effect
from rlplug.interfaces.rollout import Placement, PolicySpec
from rlplug.models.build import Models
from rlplug.models.packing_checks import check_loaded
from rlplug.observability.phase_timer import PhaseTimer
from rlplug.observability.start import StartTimer, watch_compilation
from rlplug.plugin_manager import plugins
from rlplug.rewards import RewardRunner, start_rewards
from rlplug.rollout.engine_driver import EngineDriver, RankAgreement, SyncedPolicy
from rlplug.rollout.source import RolloutGenerator, RolloutRequest, RolloutSource
from rlplug.rollout.turns.trajectory_turns import TurnRules
from rlplug.setup.build import build_models, make_optimizers
from rlplug.setup.checks.engine import check_context, check_machine, check_plugins, check_rollout
from rlplug.setup.inputs import RunInputs, read_inputs
from rlplug.setup.planning import RunParts, RunPlan, plan_fit
from rlplug.training.mismatch_gate import MismatchGate, limit_of
from rlplug.types import NO_VERSION
from rlplug.weight_sync.buckets import policy_buckets


def make_source(config: RunConfig) -> RolloutSource:
    """Return where the groups of each step come from: what a plugin gives, or the core's source."""
    found = plugins().hook.rlplug_make_source(config=config)
    if found is None and config.partial_rollout is not None:
        how = plugins().how_to_get("rlplug_make_source")
        raise ConfigError(f"model.partial_rollout comes with {how} Or remove it.")
    source = RolloutSource() if found is None else found
    if not isinstance(source, RolloutSource):
        raise PluginError(f"A plugin's rlplug_make_source returned {brief(source)}: return a RolloutSource, or None.")
    return source


def make_rewards(config: RunConfig) -> RewardRunner:
    """Return the runner of the rewards, which adds those of the environment."""
    return RewardRunner(
        config.rewards,
        deadline_s=config.limits.reward_deadline_s,
        max_error_share=config.limits.max_reward_error_share,
        has_environment=config.environment is not None,
    )


class RunModule(LightningModule):
    """A configured run."""

    parts: RunParts
    """What the run is made from, once :meth:`setup` has run."""
    models: Models
    """The sharded models, once :meth:`configure_model` has run."""
    driver: EngineDriver
    """This rank's engine, once :meth:`start_run` has run, as what follows."""
    offload: Offload

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.start_timer = StartTimer()
        self.config = config
        self.rewards = make_rewards(config)
        self.source = make_source(config)
        """Where the groups of each step come from."""
        self.phase_deadline_s = config.limits.phase_deadline_s
        self.timer = PhaseTimer(config.limits.stall_s, deadline_s=self.phase_deadline_s)
        self.stop_signal = StopSignal()
        self.schedulers: list[Any] = []

    @property
    def data(self) -> PromptDataModule:
        data: PromptDataModule = self.trainer.datamodule  # type: ignore[attr-defined]
        return data

    @property
    def strategy(self) -> RLFSDP2Strategy:
        return require_strategy(self.trainer.strategy)

    @cached_property
    def inputs(self) -> RunInputs:
        """Tokenizer, policy specification and tools, read from files at the first use."""
        return read_inputs(self.config)

    @property
    def prompt_rules(self) -> PromptRules:
        """Rules that prompts must keep; the data module asks for them in its ``setup``, before this one's."""
        return self.inputs.prompt_rules(self.config.sampling.max_new_tokens)

    def setup(self, stage: str) -> None:
        """Check what can be checked before anything is loaded, and plan a training."""
        self.start_timer.begin("checks")
        watch_compilation()
        self.timer.device = self.strategy.root_device
        config, inputs, data, strategy = self.config, self.inputs, self.data, self.strategy
        check_plugins(strategy)
        check_machine(config, inputs, strategy)
        if config.memory.offload != "none":
            plugins().registry.get_for("model.memory.offload", "StateOffload")
        plan = None
        if stage != "fit":
            check_rollout(config, inputs)
        else:
            plan = plan_fit(config, inputs, data, strategy, self.trainer.world_size)
            updates = plan.batch.num_epochs, plan.batch.num_mini_batches
            self.source.check(config.engine, config.algorithm, config.sampling.max_new_tokens, updates)
            prompts = data.train_stream.state_dict()["fingerprint"]
            self.source.identify(config.seed, prompts, config.batch.group_size, plan.total_steps)
        self.parts = RunParts(config, inputs, data, strategy, plan)

    @property
    def plan(self) -> RunPlan:
        assert self.parts.plan is not None, "there is a plan after setup('fit')"
        return self.parts.plan

    def configure_model(self) -> None:
        """Build the models, and start the rewards, which may take memory of the device too."""
        self.start_timer.begin("models")
        built: Models | None = getattr(self, "models", None)  # by a validation before the training
        self.models = build_models(self.parts, built)
        if built is None:
            notes = [*self.inputs.notes, *start_rewards(self.config.rewards, self.strategy.root_device)]
            self.models.effects += [Effect(note) for note in notes]
        self.strategy.accept_checkpoint = self._accept_checkpoint

    def _accept_checkpoint(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another trainer or base model, and say where the weights come from in its place."""
        from rlplug.training.trainer_record import check_records

        check_records(self.config.model_trainer, self.models.adapters, folder, state)
        kept = [effect for effect in self.models.effects if not effect.is_of_start]
        self.models.effects = [Effect(f"weights of the checkpoint {folder}"), *kept]

    def configure_optimizers(self) -> Any:
        optimizers, self.schedulers = make_optimizers(self.config, self.models)
        return optimizers, [scheduler for scheduler in self.schedulers if scheduler is not None]

    def start_run(self) -> None:
        """Start this rank's engine, and let the source generate with it."""
        self.start_timer.begin("packing check")
        end_at_once(self.global_rank)
        config, inputs, data, strategy = self.config, self.inputs, self.data, self.strategy
        models, plan, stop = self.models, self.parts.plan, self.stop_signal
        if plan is not None:
            critic = None if config.critic is None or config.critic.share_trunk else models.critic
            for name, model in (("policy", models.policy), ("reference", models.reference), ("critic.trunk", critic)):
                if model is not None:
                    check_loaded(f"model.{name}", model, strategy)
        self.start_timer.begin("engine start")
        self.offload = Offload()
        if config.memory.offload != "none":
            self.offload = plugins().registry.get_for("model.memory.offload", "StateOffload")(
                config.memory.offload,
                strategy.root_device,
                trained=[model for model in (models.policy, models.critic) if model is not None],
                reference=[] if models.reference is None or config.reference_is_policy else [models.reference],
                optimizers=self.trainer.optimizers,
            )
        weights = config.model_trainer.hf_weights(models.policy)
        max_bytes = config.weight_sync.bucket_mib << 20
        make_buckets = partial(policy_buckets, models.policy, inputs.spec, max_bytes, weights)
        self.driver = EngineDriver(
            engine=config.engine,
            policy=SyncedPolicy(inputs.spec, make_buckets, plugins().hook),
            placement=Placement(strategy.root_device, strategy.global_rank, strategy.world_size),
            offload=self.offload,
            sleeps=config.memory.sleep_between_rollouts is True if plan is None else plan.sleeps,
            max_restarts=config.limits.max_engine_restarts,
            agreement=RankAgreement(strategy.any_rank, stop.poll, lambda: strategy.agree_to_stop(stop)),
            note_asleep=self.timer.note_asleep,
        )
        try:  # servers have said their context by now
            check_context(config.engine, inputs.spec, data.longest_prompt, config.sampling.max_new_tokens)
        except RLPlugError:
            self.driver.close()
            raise
        self.source.start(make_generator(config, inputs, self.driver, data, strategy.gather, strategy.store))

    def teardown(self, stage: str) -> None:
        self.stop_signal.uninstall()
        if hasattr(self.source, "generator"):
            self.source.close()


def make_generator(
    config: RunConfig,
    inputs: RunInputs,
    driver: EngineDriver,
    data: PromptDataModule,
    gather: Callable[[Any], Any] = list,
    store: Store | None = None,
) -> RolloutGenerator:
    """Return what generates with this rank's engine and the configured environment, for prompts as ``data`` has them.

    They are rendered by now. ``gather`` concatenates all ranks' lists; by default there is one rank, without a store.
    """

    def make_rules() -> TurnRules:
        stop = None
        if inputs.spec.stop:
            from rlplug.rollout.turns.stop_strings import StopStrings

            stop = StopStrings(inputs.tokenizer, inputs.spec)
        if config.environment is None:
            return TurnRules(config.turns, stop=stop)
        from rlplug.rollout.turns.environment_calls import EnvironmentCalls
        from rlplug.rollout.turns.observation_tokens import ObservationTokens

        tokenizer, tools = inputs.tokenizer, data.template_tools
        observations = ObservationTokens(tokenizer, data.renders_chat, tools, has_tools=bool(inputs.tools))
        end_tokens = inputs.spec.eos_token_ids
        environments = EnvironmentCalls(config.environment, tokenizer, end_tokens, config.turns, observations)
        return TurnRules(config.turns, environments, observations, stop)

    return RolloutGenerator(driver, inputs.tokenizer, make_rules, gather, store)


def validation_request(config: RunConfig) -> RolloutRequest:
    """Return how held-out prompts are sampled, without the prompts and the version of the policy."""
    sampling = config.validation.sampling_of(config.sampling)
    return RolloutRequest((), config.validation.num_samples, sampling, f"validate/{config.seed}", NO_VERSION)


def make_mismatch_gate(config: RunConfig, policy: PolicySpec, device: torch.device) -> MismatchGate:
    """Return what compares engine and trainer; its limit follows from the policy's dtype unless it is configured."""
    usual, limits = limit_of(policy, device, config.sampling), config.limits
    gate = usual if limits.mismatch_gate == "auto" else limits.mismatch_gate
    engine, has_old_tokens = type(config.engine).__name__, config.partial_rollout is not None
    max_age = None if config.partial_rollout is None else config.partial_rollout.bound
    extra = config.sampling.extra
    return MismatchGate(engine, gate, usual, limits.gate_every_step, has_old_tokens, max_age, extra)


def limit_host_threads(device: torch.device) -> None:
    """Run torch's operations on the host in one thread, when the trainer's device is a GPU.

    The operations that are left for the host are small, and waking threads for each takes many times as long: a sum
    over a step's tokens took 16 ms on a machine of 32 cores. Lightning gives a single process all of the cores.
    """
    if device.type == "cuda":
        torch.set_num_threads(1)


def freeze_gc() -> None:
    """Freeze live objects (``gc.freeze``), so that later collections skip what start-up and compilation allocated.

    A step makes many small objects, and each full collection would scan millions of others.
    """
    gc.collect()
    gc.freeze()
