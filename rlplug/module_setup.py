"""What an RL run is made of, and how Lightning sets it up: all of :class:`rlplug.module.RLModule` but the loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlplug.batching import BatchPlan, BatchSizes, attention_cost
from rlplug.critic import CriticConfig
from rlplug.errors import ConfigError
from rlplug.interfaces.algorithm import Algorithm, RunFacts
from rlplug.interfaces.optimization import Effect, Optimization
from rlplug.interfaces.reward import Reward
from rlplug.interfaces.rollout import Placement, PolicySpec, RolloutEngine
from rlplug.learners import Learners
from rlplug.memory.decide import Decisions, SleepSetting, shortfall
from rlplug.memory.facts import GPU, total_and_free
from rlplug.memory.run_facts import PlannedRun
from rlplug.mesh import MeshSizes
from rlplug.model_files import read_config
from rlplug.networks import build_critic, build_policy, build_reference
from rlplug.objectives import Trainee
from rlplug.offload import Offload, OffloadMode
from rlplug.passes import Passes
from rlplug.phases import PhaseClock, StopSignal
from rlplug.plugin_manager import plugins
from rlplug.policy import PolicyConfig, load_spec, load_tokenizer
from rlplug.process import exempt_from_collection, use_one_host_thread
from rlplug.prompt_stream import PromptStream
from rlplug.rewards import RewardRunner
from rlplug.rng import rng_state, set_rng_state
from rlplug.rollout.driver import EngineDriver
from rlplug.rollout.hf import HFRollout
from rlplug.run_checks import (
    check_algorithm,
    check_engine,
    check_max_grad_norm,
    check_networks,
    check_optimizations,
    check_sampling,
)
from rlplug.strategy import RLFSDP2Strategy
from rlplug.types import Prompt, Sample, SamplingParams
from rlplug.update import Update
from rlplug.validation import ValidationConfig


class RLModuleSetup(LightningModule):
    """The parts and options of a run.

    Args:
        policy: The model.
        critic: The value function, for an algorithm that needs one, such as PPO; ``{}`` takes every default.
        reference: The frozen model that a KL penalty holds the policy near; by default the policy's initial model.
        algorithm: Advantages and loss, by name: ``GRPO``.
        rewards: One or more; their weighted sum trains.
        rollout: The engine; ``HFRollout``, transformers' own ``generate``, by default.
        batch: Global and per-GPU sizes.
        sampling: How training completions are drawn.
        optimizer: Called with the policy's parameters.
        lr_scheduler: Called with the optimizer; steps once per RL step.
        optimizations: Applied in order, before and after sharding; one without an effect stops the run.
        num_steps: RL steps to take; by default one pass over the training prompts.
        max_grad_norm: Clip gradients to this global norm; ``null`` only measures it.
        validation: When and how held-out prompts are scored.
        seed: Of completions and of the order of mini-batches.
        mismatch_gate: The run stops in its first step when engine and trainer disagree on the sampled tokens by more
            than this, as the mean absolute difference of logprobs in nats. bf16 engines show about 0.03. ``null``
            only measures it.
        gate_every_step: Hold every step to ``mismatch_gate``: proof that each weight sync brought what was trained.
        on_nonfinite: After a NaN or infinite loss or gradient, ``stop`` the run or ``skip`` that optimizer step. The
            batch is saved for inspection either way.
        reward_deadline_s: Longest time for one reward call.
        max_reward_error_share: The run stops when a larger share of a step's samples has no reward.
        sleep_between_rollouts: Let the engine give its device memory back while the policy is updated; ``auto`` does
            so when the memory plan says that update and engine do not fit together.
        offload: What the trainer moves to host memory while the engine generates: nothing, the optimizers' state, or
            the weights and the reference policy as well.
        on_memory_shortfall: When the memory plan of a GPU run does not fit, ``stop`` before anything is loaded, or
            ``warn``.
        sync_bucket_mib: Weights travel to the engine in buckets of at most this size.
        max_engine_restarts: How often one rollout may start its engines anew after one died or missed a deadline.
        stall_s: Write Python stacks to stderr when one phase takes longer.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        algorithm: Algorithm,
        rewards: list[Reward],
        rollout: RolloutEngine | None = None,
        critic: CriticConfig | None = None,
        reference: PolicyConfig | None = None,
        batch: BatchSizes = BatchSizes(),  # noqa: B008 - never changed
        sampling: SamplingParams = SamplingParams(),  # noqa: B008
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, fused=True),
        lr_scheduler: LRSchedulerCallable | None = None,
        optimizations: list[Optimization] | None = None,
        num_steps: int | None = None,
        max_grad_norm: float | None = 1.0,
        validation: ValidationConfig = ValidationConfig(),  # noqa: B008
        seed: int = 0,
        mismatch_gate: float | None = 0.1,
        gate_every_step: bool = False,
        on_nonfinite: Literal["stop", "skip"] = "stop",
        reward_deadline_s: float = 30.0,
        max_reward_error_share: float = 0.1,
        sleep_between_rollouts: SleepSetting = "auto",
        offload: OffloadMode = "none",
        on_memory_shortfall: Literal["stop", "warn"] = "stop",
        sync_bucket_mib: int = 1024,
        max_engine_restarts: int = 2,
        stall_s: float = 1800.0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy_config = policy
        self.critic_config = critic
        self.reference_config = reference
        self.algorithm = algorithm
        self.engine = rollout or HFRollout()
        self.rewards = RewardRunner(rewards, deadline_s=reward_deadline_s, max_error_share=max_reward_error_share)
        self.batch_sizes = batch
        self.sampling = sampling
        self.make_optimizer = optimizer
        self.make_lr_scheduler = lr_scheduler
        self.optimizations = optimizations or []
        self.num_steps = num_steps
        self.max_grad_norm = max_grad_norm
        self.validation = validation
        self.seed = seed
        self.mismatch_gate = mismatch_gate
        self.gate_every_step = gate_every_step
        self.on_nonfinite = on_nonfinite
        self.sleep_between_rollouts = sleep_between_rollouts
        self.offload_mode = offload
        self.on_memory_shortfall = on_memory_shortfall
        self.sync_bucket_bytes = sync_bucket_mib << 20
        self.max_engine_restarts = max_engine_restarts
        self.stall_s = stall_s

        self.rollout_step = 0
        """RL steps done; Lightning's ``global_step`` counts optimizer steps."""
        self.step = 0
        """Number of the step that runs, from 1: in metrics, samples, hooks and messages."""
        self.policy_version = 0
        self.step_metrics: dict[str, float] = {}
        self.newest_metrics: dict[str, float] = {}
        """Of the last step that was logged, for the progress bar."""
        self.newest_samples: list[tuple[str, int, Sequence[Sample]]] = []
        """What they are (``train``, ``validate``, ``reward_errors``), step and samples, for whoever logs them."""
        self.effects: list[Effect] = []
        self.memory: Decisions | None = None
        """The memory plan of a training on GPUs, and what it decided."""
        self.sleeps = sleep_between_rollouts is True
        """Whether the engine sleeps between rollouts, once ``setup`` has resolved ``auto``."""
        self.run_dir: Path | None = None
        self.stop_signal = StopSignal()
        self._is_first_step = True
        self._reference: list[nn.Module] = []  # in a list, so that it is not part of the checkpoint

    # ---- set-up, in the order in which Lightning calls it ---------------------------------------------------------

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.policy_config)

    @cached_property
    def spec(self) -> PolicySpec:
        return load_spec(self.policy_config, self.tokenizer)

    @property
    def max_context(self) -> int:
        """Longest sequence of the policy, in tokens."""
        return self.spec.max_context

    @property
    def strategy(self) -> RLFSDP2Strategy:
        strategy = self.trainer.strategy
        if not isinstance(strategy, RLFSDP2Strategy):
            raise ConfigError(
                f"trainer.strategy is {type(strategy).__name__}: rlplug shards and synchronises the policy itself. "
                "Set trainer.strategy to rlplug.strategy.RLFSDP2Strategy, on one device too."
            )
        return strategy

    @property
    def total_steps(self) -> int:
        return self.num_steps or max(1, len(self.stream) // self.plan.prompts_per_step)

    @property
    def stream(self) -> PromptStream:
        stream: PromptStream = self._datamodule.train_stream
        return stream

    @property
    def val_prompts(self) -> list[Prompt]:
        prompts: list[Prompt] = self._datamodule.val_prompts
        return prompts

    @property
    def _datamodule(self) -> Any:
        return self.trainer.datamodule  # type: ignore[attr-defined]

    @property
    def on_policy_pass(self) -> str | None:
        """Why the policy runs once before each update even when that is exactly on-policy, in a few words."""
        if self.algorithm.needs.old_logprobs:
            return "the advantages of the algorithm need them"
        if self.critic_config is not None and self.critic_config.share_trunk:
            return "by the pass that computes values"
        return None

    def setup(self, stage: str) -> None:
        """Check what can be checked before anything is loaded."""
        engines = plugins().registry.classes("rollouts").values()
        check_engine(self.engine, self.algorithm, engines, self.sleep_between_rollouts, self.mismatch_gate)
        check_optimizations(self.optimizations)
        self.clock = PhaseClock(self.strategy.root_device, self.stall_s)
        if stage == "fit":
            check_sampling(self.sampling, self.validation, bool(self.val_prompts))
            check_max_grad_norm(self.max_grad_norm, "model.max_grad_norm")
            mesh = self.strategy.mesh_sizes(self.trainer.world_size)
            self.plan = self.make_batch_plan(mesh, self._longest)
            check_algorithm(
                self.algorithm, self.plan, self.critic_config, self.reference_config, num_steps=self.total_steps
            )
            trunk = None if self.critic_config is None else self.critic_config.trunk
            networks = {"policy": self.policy_config, "reference": self.reference_config, "critic.trunk": trunk}
            check_networks(networks, self.tokenizer, self._longest, self.strategy.sequence_size)
            self.algorithm.setup(
                RunFacts(self.plan.num_completions, self.plan.group_size, self.sampling.max_new_tokens)
            )
            if self.strategy.root_device.type == "cuda":
                self._settle_memory(mesh)

    @property
    def _longest(self) -> int:
        """Tokens of the longest possible prompt and completion."""
        return self.stream.longest_prompt + self.sampling.max_new_tokens

    def make_batch_plan(self, mesh: MeshSizes, longest: int) -> BatchPlan:
        """Resolve the sizes for the ranks of ``mesh`` and sequences of up to ``longest`` tokens."""
        config = read_config(self.policy_config.path, "model.policy").get_text_config()
        return BatchPlan(
            self.batch_sizes,
            mesh.world_size,
            data_size=mesh.data_size,
            sequence_size=mesh.sequence,
            longest=longest,
            quadratic_cost=attention_cost(config),
        )

    def _settle_memory(self, mesh: MeshSizes) -> None:
        """Plan for the fullest GPU of all ranks, so that they decide alike.

        Raises:
            ConfigError: The plan does not fit.
        """
        gpus = [GPU(*numbers) for numbers in self.strategy.gather([total_and_free(self.strategy.root_device)])]
        run = PlannedRun.of(self, self.strategy, mesh, self._longest)
        self.memory = run.decide(min(gpus, key=lambda gpu: gpu.capacity))
        self.sleeps, self.optimizations = self.memory.plan.facts.sleeps, list(self.memory.kept)
        problem = shortfall(self.memory.plan)
        if problem is not None and self.on_memory_shortfall == "stop":
            raise problem
        if problem is not None:
            rank_zero_warn(str(problem))

    def configure_model(self) -> None:
        """Build what the stage needs and former stages, such as a validation, have not built."""
        if not hasattr(self, "policy"):
            self.policy, self.effects = build_policy(self.policy_config, self.optimizations, self.strategy)
            self.effects += self.memory.left_out if self.memory is not None else ()
        if self.trainer.state.fn != "fit":
            return
        if self.algorithm.needs.reference_policy and not self._reference:
            reference, effects = build_reference(
                self.reference_config, self.policy_config, self.optimizations, self.strategy
            )
            self._reference = [reference]
            self.effects += effects
        if self.critic_config is not None and not hasattr(self, "critic"):
            self.critic, effects = build_critic(
                self.critic_config, self.policy, self.policy_config, self.optimizations, self.strategy
            )
            self.effects += effects

    def configure_optimizers(self) -> Any:
        optimizers = [self.make_optimizer(self.policy.named_parameters())]
        make_schedulers = [self.make_lr_scheduler]
        if self.critic_config is not None:
            optimizers.append(self.critic_config.make_optimizer(self.critic.named_parameters()))
            make_schedulers.append(self.critic_config.lr_scheduler)
        pairs = zip(make_schedulers, optimizers, strict=True)
        self._schedulers = [None if make is None else make(optimizer) for make, optimizer in pairs]
        return optimizers, [scheduler for scheduler in self._schedulers if scheduler is not None]

    def on_train_start(self) -> None:
        self._start_engine()
        self.learners = self._make_learners()
        self.updater = Update(
            passes=Passes(self.plan, self.strategy),
            backward=self.manual_backward,
            skip_nonfinite=self.on_nonfinite == "skip",
            seed=self.seed,
        )
        self.stop_signal.install()
        use_one_host_thread(self.strategy.root_device)
        exempt_from_collection()

    def _make_learners(self) -> Learners:
        optimizers: Any = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        critic = None
        if self.critic_config is not None:
            critic = Trainee(
                "critic", self.critic, optimizers[1], self._schedulers[1], self.critic_config.max_grad_norm
            )
        return Learners(
            policy=Trainee("policy", self.policy, optimizers[0], self._schedulers[0], self.max_grad_norm),
            critic=critic,
            critic_config=self.critic_config,
            reference=self._reference[0] if self._reference else None,
            algorithm=self.algorithm,
            sampling=self.sampling,
            hook=plugins().hook,
        )

    def on_train_end(self) -> None:
        self.stop_signal.uninstall()

    def on_validation_start(self) -> None:
        self._start_engine()

    def teardown(self, stage: str) -> None:
        self.stop_signal.uninstall()
        if hasattr(self, "driver"):
            self.driver.close()

    def _start_engine(self) -> None:
        self.offload = Offload(
            self.offload_mode,
            self.strategy.root_device,
            trained=[self.policy, self.critic] if hasattr(self, "critic") else [self.policy],
            reference=self._reference,
            optimizers=self.trainer.optimizers,
        )
        self.driver = EngineDriver(
            engine=self.engine,
            policy=self.policy,
            spec=self.spec,
            placement=Placement(self.strategy.root_device, self.global_rank, self.trainer.world_size),
            tokenizer=self.tokenizer,
            hook=plugins().hook,
            sleeps=self.sleeps,
            bucket_bytes=self.sync_bucket_bytes,
            offload=self.offload,
            any_rank=self.strategy.any_rank,
            max_restarts=self.max_engine_restarts,
        )
        self.clock.asleep_bytes = self.driver.asleep_bytes

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rlplug"] = {
            "rollout_step": self.rollout_step,
            "policy_version": self.policy_version,
            "algorithm": self.algorithm.state_dict(),
            "stepped": [bool(optimizer.state) for optimizer in self.trainer.optimizers],
            "rng": self.strategy.gather([rng_state()]),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["rlplug"]
        self.rollout_step = self.step = state["rollout_step"]
        self.policy_version = state["policy_version"]
        self.algorithm.load_state_dict(state["algorithm"])
        for optimizer, stepped in zip(self.trainer.optimizers, state["stepped"], strict=False):  # none to validate
            if not stepped:
                optimizer.state.clear()  # see RLFSDP2Strategy.optimizer_state
        set_rng_state(state["rng"][self.global_rank % len(state["rng"])])
