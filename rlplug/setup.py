"""Setup of a run from its configuration: reads its files, plans it, builds its models, and starts its parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch._C._distributed_c10d import Store
from transformers import PreTrainedTokenizerBase

from rlplug.config import RunConfig
from rlplug.config_checks import (
    UNCORRECTED,
    check_engine,
    check_optimizations,
    check_optimizers,
    check_streamed_prompts,
    check_streaming,
    check_trainer,
    check_training,
)
from rlplug.data.datamodule import PromptDataModule
from rlplug.data.prompt_encoder import PromptRules
from rlplug.distributed.offload import Offload
from rlplug.distributed.stop_signal import StopSignal
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces.algorithm import RunInfo
from rlplug.interfaces.optimization import Effect, Optimization
from rlplug.interfaces.rollout import Placement, PolicySpec
from rlplug.memory_inputs import PlannedRun
from rlplug.models.build import Models, build_critic, build_policy, build_reference
from rlplug.models.config import load_spec, load_tokenizer
from rlplug.models.hf_files import read_config
from rlplug.models.lora.adapters import WithoutAdapters, adapter_weights
from rlplug.models.routers import router_shape
from rlplug.models.shape import attention_cost
from rlplug.plugin_manager import CORE, plugins
from rlplug.rewards import RewardRunner, start_rewards
from rlplug.rollout.engine_driver import EngineDriver
from rlplug.rollout.environment_calls import ask_environment
from rlplug.rollout.generator import RolloutGenerator
from rlplug.rollout.observation_tokens import ObservationTokens
from rlplug.training.actor_critic import ActorCritic, TrainableModel
from rlplug.training.batch_plan import BatchPlan
from rlplug.training.forward_backward import MicroBatchRunner
from rlplug.training.memory_plan.decisions import Decisions, shortfall
from rlplug.training.memory_plan.inputs import GPU, total_and_free
from rlplug.training.samples.token_capture import TokenCapture
from rlplug.training.trainer_record import adapter_record, check_records
from rlplug.training.update import PolicyUpdate
from rlplug.types import MeshSizes
from rlplug.weight_sync.buckets import policy_buckets
from rlplug.weight_sync.fp8_layers import choose_fp8_weights, describe
from rlplug.weight_sync.manifest import adapters_line, meta_model


@dataclass(frozen=True)
class RunInputs:
    """Facts about policy and environment that are known before a weight is loaded."""

    tokenizer: PreTrainedTokenizerBase
    spec: PolicySpec
    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of the functions that the policy may call in its environment."""
    notes: Sequence[str] = ()
    """What a person should know of the environment."""

    def prompt_rules(self, max_new_tokens: int) -> PromptRules:
        """Return the rules that prompts must keep beside completions of up to ``max_new_tokens``."""
        return PromptRules(self.tokenizer, self.tools, self.spec.max_context, max_new_tokens)


@dataclass(frozen=True)
class RunPlan:
    """A training run as it will be, decided before a weight is loaded."""

    mesh: MeshSizes
    longest: int
    """Tokens of the longest possible prompt and completion."""
    batch: BatchPlan
    total_steps: int
    optimizations: tuple[Optimization, ...]
    """Configured optimizations, without those that the memory plan could leave out."""
    sleeps: bool
    """Whether the engine sleeps between rollouts."""
    memory: Decisions | None = None
    """The memory plan of a run on GPUs, and what it decided."""


@dataclass(frozen=True)
class Run:
    """The parts that run rollouts, in training and in validation."""

    offload: Offload
    driver: EngineDriver
    generator: RolloutGenerator

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of engine, environments and offload since the last call."""
        return self.driver.pop_metrics() | self.generator.pop_metrics() | self.offload.pop_metrics()


def make_rewards(config: RunConfig) -> RewardRunner:
    """Return the runner of the rewards, which adds those of the environment."""
    return RewardRunner(
        config.rewards,
        deadline_s=config.limits.reward_deadline_s,
        max_error_share=config.limits.max_reward_error_share,
        has_environment=config.environment is not None,
    )


def read_inputs(config: RunConfig) -> RunInputs:
    """Read the policy's files, without its weights, and ask an environment for its tools.

    Raises:
        ConfigError: The files are missing or contradict each other.
    """
    tokenizer = load_tokenizer(config.policy, make=plugins().hook.rlplug_make_tokenizer)
    spec = load_spec(config.policy, tokenizer)
    if config.weight_sync.dtype is not None:
        spec = replace(spec, fp8=choose_fp8_weights(meta_model(spec.path), config.weight_sync))
    if config.lora is not None and config.lora.sync == "adapters":
        spec = replace(spec, adapters=adapter_weights(config.policy, config.lora))
    if config.router_replay:
        spec = replace(spec, routers=router_shape(meta_model(spec.path), "model.router_replay"))
    tools: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    if config.environment is not None:
        tools, notes = ask_environment(config.environment)
    return RunInputs(tokenizer, spec, tools, notes)


def check_rollout(config: RunConfig, inputs: RunInputs, engine_is_here: bool = True) -> None:
    """Refuse an engine that cannot do what the run asks of it, and optimizations that do not go together.

    Args:
        config: Options of the run.
        inputs: Facts about policy and environment.
        engine_is_here: False for a run that is planned for another machine, whose engine may sleep or take FP8 where
            this one's cannot.

    Raises:
        ConfigError: The message names the key and the fix.
    """
    check_engine(config, plugins().registry.classes("rollouts").values(), engine_is_here)
    config.engine.check(inputs.spec)
    check_optimizations(config.optimizations)


def check_machine(config: RunConfig, inputs: RunInputs, strategy: RLFSDP2Strategy) -> None:
    """Refuse a machine that lacks what the engine needs, which may be a library or a GPU.

    Raises:
        ConfigError: The message names what is missing and how to get it.
    """
    config.engine.prepare(inputs.spec, Placement(strategy.root_device, strategy.global_rank, strategy.world_size))


def plan_run(
    config: RunConfig,
    inputs: RunInputs,
    data: PromptDataModule,
    strategy: RLFSDP2Strategy,
    world_size: int,
    gpu: GPU | None,
) -> RunPlan:
    """Check all that can be checked before anything is loaded, and decide sizes and memory.

    Args:
        config: Options of the run.
        inputs: Facts about policy and environment, read from files.
        data: Data module with the prompts.
        strategy: Only its options are read: it need not be set up.
        world_size: Ranks of the run.
        gpu: The fullest GPU of the run; ``None`` without GPUs, where memory is not planned.

    Raises:
        ConfigError: The message names the key and the fix.
    """
    check_rollout(config, inputs, engine_is_here=gpu is None or gpu.is_here)
    mesh = strategy.mesh_sizes(world_size)
    check_trainer(config, mesh)
    longest = data.train_stream.longest_prompt + config.sampling.max_new_tokens
    text_config = read_config(config.policy.path, "model.policy").get_text_config()
    batch = BatchPlan(
        config.batch,
        mesh.world_size,
        data_size=mesh.data_size,
        sequence_size=mesh.sequence,
        longest=longest,
        quadratic_cost=attention_cost(text_config),
    )
    num_prompts = data.train_stream.num_prompts
    check_streamed_prompts(config, num_prompts is None)
    total_steps = config.num_steps or max(1, (num_prompts or 0) // batch.prompts_per_step)
    hook = plugins().hook.rlplug_make_tokenizer
    check_training(config, batch, total_steps, longest, mesh.sequence, inputs.tokenizer, hook, bool(data.val_prompts))
    in_fp8 = inputs.spec.fp8 is not None
    algorithm = config.algorithm
    if config.partial_rollout is not None and config.partial_rollout.streams:
        callers = plugins().call_order()["prepare_batch"]
        check_streaming(algorithm, batch, [caller.plugin for caller in callers if caller.plugin != CORE])
    max_new_tokens = config.sampling.max_new_tokens
    algorithm.setup(RunInfo(batch.num_completions, batch.group_size, max_new_tokens, in_fp8, config.seed))
    if in_fp8 and not algorithm.needs.rollout_logprobs:
        rank_zero_warn(UNCORRECTED.format(name=type(algorithm).__name__))
    sleeps = config.memory.sleep_between_rollouts is True
    plan = RunPlan(mesh, longest, batch, total_steps, tuple(config.optimizations), sleeps)
    if gpu is None:
        return plan
    memory = PlannedRun(config, inputs.spec, batch, strategy, mesh, longest).decide(gpu)
    return replace(plan, memory=memory, sleeps=memory.plan.facts.sleeps, optimizations=memory.kept)


def fullest_gpu(strategy: RLFSDP2Strategy) -> GPU | None:
    """Return the GPU with the least memory to plan with of all ranks, so that they decide alike; ``None`` on CPUs."""
    if strategy.root_device.type != "cuda":
        return None
    gpus = [GPU(*numbers) for numbers in strategy.gather([total_and_free(strategy.root_device)])]
    return min(gpus, key=lambda gpu: gpu.capacity)


def plan_fit(
    config: RunConfig, inputs: RunInputs, data: PromptDataModule, strategy: RLFSDP2Strategy, world_size: int
) -> RunPlan:
    """Plan a run on the ranks of ``strategy``, which is set up, and refuse or warn when it does not fit.

    Raises:
        ConfigError: The message names the key and the fix.
    """
    check_optimizers(config, strategy.mesh, strategy.root_device)
    plan = plan_run(config, inputs, data, strategy, world_size, fullest_gpu(strategy))
    if plan.memory is not None:
        refuse_shortfall(config, plan.memory)
    return plan


def refuse_shortfall(config: RunConfig, memory: Decisions) -> None:
    """Stop before anything is loaded when the memory plan does not fit, or warn, as ``model.memory`` says."""
    problem = shortfall(memory.plan)
    if problem is not None and config.memory.on_shortfall == "stop":
        raise problem
    if problem is not None:
        rank_zero_warn(str(problem))


def build_models(
    models: Models, config: RunConfig, inputs: RunInputs, plan: RunPlan | None, strategy: RLFSDP2Strategy
) -> None:
    """Build the models that are missing: those of training with ``plan``, the policy alone without.

    A validation before the training has built the policy already.
    """
    trainer = config.model_trainer
    if plan is None:
        check_trainer(config, strategy.mesh_sizes(strategy.world_size))
    optimizations = config.optimizations if plan is None else plan.optimizations
    if models.policy is None:
        models.policy, effects = build_policy(
            config.policy, optimizations, strategy, trainer, config.router_replay, config.lora
        )
        models.effects += effects
        models.effects += () if plan is None or plan.memory is None else plan.memory.left_out
        models.effects += () if inputs.spec.fp8 is None else (Effect(describe(inputs.spec.fp8)),)
        if inputs.spec.adapters is not None:
            models.effects += (Effect(adapters_line(inputs.spec, type(config.engine).__name__)),)
        models.adapters = adapter_record(models.policy, strategy.gather)
        notes = [*inputs.notes, *start_rewards(config.rewards, strategy.root_device)]
        models.effects += [Effect(note) for note in notes]
    strategy.accept_checkpoint = partial(check_records, trainer, models.adapters)
    if plan is None:
        return
    if config.reference_is_policy and models.reference is None:
        models.set_reference(WithoutAdapters(models.policy))
        models.effects += [Effect("reference: the policy without its adapters")]
    if config.algorithm.needs.reference_policy and models.reference is None:
        reference, effects = build_reference(config.reference, config.policy, optimizations, strategy, trainer)
        models.set_reference(reference)
        models.effects += effects
    if config.critic is not None and models.critic is None:
        models.critic, effects = build_critic(
            config.critic, models.policy, config.policy, optimizations, strategy, trainer
        )
        models.effects += effects


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


def make_optimizers(config: RunConfig, models: Models) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and their schedulers (``None`` for a constant rate): the policy's, then the critic's."""
    assert models.policy is not None
    trained = [(name, weight) for name, weight in models.policy.named_parameters() if weight.requires_grad]
    optimizers = [config.optimizer(trained)]
    make_schedulers = [config.lr_scheduler]
    if config.critic is not None and models.critic is not None:
        optimizers.append(config.critic.make_optimizer(models.critic.named_parameters()))
        make_schedulers.append(config.critic.lr_scheduler)
    pairs = zip(make_schedulers, optimizers, strict=True)
    return optimizers, [None if make is None else make(optimizer) for make, optimizer in pairs]


def take_optimizer_options(
    config: RunConfig, models: Models, optimizers: Sequence[Any], schedulers: Sequence[Any], num_steps: Sequence[int]
) -> None:
    """Give resumed optimizers and schedulers the options of a changed configuration; their state stays.

    Args:
        config: Options of the run.
        models: Policy and critic.
        optimizers: The policy's, then the critic's, as restored.
        schedulers: Theirs; ``None`` for a constant rate.
        num_steps: RL steps that each has taken, after which a new schedule gives the rate.
    """
    for optimizer, scheduler, new, new_scheduler, steps in zip(
        optimizers, schedulers, *make_optimizers(config, models), num_steps, strict=True
    ):
        if new_scheduler is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step")
                for _ in range(steps):
                    new_scheduler.step()
            scheduler.load_state_dict(new_scheduler.state_dict())
        for group, new_group in zip(optimizer.param_groups, new.param_groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(new_group | {"params": parameters})


def make_update(
    config: RunConfig,
    plan: RunPlan,
    models: Models,
    strategy: RLFSDP2Strategy,
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    backward: Callable[[Any], None],
    capture: TokenCapture | None,
) -> PolicyUpdate:
    """Join models with their optimizers and schedulers, the policy's first, into what updates them."""
    assert models.policy is not None
    policy = TrainableModel("policy", models.policy, optimizers[0], schedulers[0], config.limits.max_grad_norm)
    critic = None
    if config.critic is not None:
        assert models.critic is not None
        critic = TrainableModel("critic", models.critic, optimizers[1], schedulers[1], config.critic.max_grad_norm)
    return PolicyUpdate(
        models=ActorCritic(
            policy=policy,
            critic=critic,
            critic_config=config.critic,
            reference=models.reference,
            algorithm=config.algorithm,
            sampling=config.sampling,
            hook=plugins().hook,
        ),
        runner=MicroBatchRunner(plan.batch, strategy, capture),
        backward=backward,
        skip_nonfinite=config.limits.on_nonfinite == "skip",
        seed=config.seed,
    )
