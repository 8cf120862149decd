"""The options of an RL run, with their defaults, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlplug.data.prompt_stream import PromptStream
from rlplug.distributed.offload import OffloadMode
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.errors import ConfigError
from rlplug.interfaces.algorithm import Algorithm
from rlplug.interfaces.environment import Environment
from rlplug.interfaces.optimization import Effect, Optimization
from rlplug.interfaces.reward import Reward
from rlplug.interfaces.rollout import PolicySpec, RolloutEngine
from rlplug.models.config import ModelConfig, load_spec, load_tokenizer
from rlplug.models.critic import CriticConfig
from rlplug.observability.phase_timer import StopSignal
from rlplug.plugin_manager import plugins
from rlplug.rewards import RewardRunner
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.hf_engine import HFRollout
from rlplug.rollout.partial_rollout import PartialRolloutState
from rlplug.training.batch_plan import BatchSizes
from rlplug.training.memory_plan.decisions import Decisions, SleepSetting
from rlplug.training.validation import ValidationConfig
from rlplug.types import Prompt, Sample, SamplingParams
from rlplug.weight_sync.config import WeightSyncOptions
from rlplug.weight_sync.fp8_layers import choose_fp8_weights
from rlplug.weight_sync.manifest import meta_model


class RLModuleOptions(LightningModule):
    """The parts and options of a run.

    Args:
        policy: The model.
        critic: The value function, for an algorithm that needs one, such as PPO; ``{}`` takes every default.
        reference: The frozen model that a KL penalty holds the policy near; by default the policy's initial model.
        algorithm: Advantages and loss, by name: ``GRPO``.
        rewards: Their weighted sum trains, with what the environment gives, if there is one.
        rollout: The engine; ``HFRollout``, transformers' own ``generate``, by default.
        batch: Global and per-GPU sizes.
        sampling: How training completions are drawn.
        environment: What answers the policy after each turn, by name; every trajectory gets one of its own. By default
            a completion is one turn.
        turns: Limits of trajectories with an environment.
        partial_rollout: Let long trajectories go on in the next step; by default a step waits for all of its own.
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
        weight_sync: In what form weights travel to the engine: ``transform: fp8_block`` lets it calculate in FP8.
        sync_bucket_mib: Weights travel to the engine in buckets of at most this size.
        max_engine_restarts: How often one rollout may start its engines anew after one died or missed a deadline.
        stall_s: Write Python stacks to stderr when one phase takes longer.
    """

    def __init__(
        self,
        policy: ModelConfig,
        algorithm: Algorithm,
        rewards: list[Reward] | None = None,
        rollout: RolloutEngine | None = None,
        critic: CriticConfig | None = None,
        reference: ModelConfig | None = None,
        batch: BatchSizes = BatchSizes(),  # noqa: B008 - never changed
        sampling: SamplingParams = SamplingParams(),  # noqa: B008
        environment: Callable[[], Environment] | None = None,
        turns: TurnOptions = TurnOptions(),  # noqa: B008
        partial_rollout: PartialRollout | None = None,
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
        weight_sync: WeightSyncOptions = WeightSyncOptions(),  # noqa: B008
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
        self.rewards = RewardRunner(
            rewards or [],
            deadline_s=reward_deadline_s,
            max_error_share=max_reward_error_share,
            has_environment=environment is not None,
        )
        if environment is None and turns != TurnOptions():
            raise ConfigError("model.turns is set, and model.environment is not: name an environment, or remove it.")
        self.make_environment = environment
        self.turns = turns
        self.in_flight = None if partial_rollout is None else PartialRolloutState(partial_rollout)
        """Groups that go on in the next step."""
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
        self.weight_sync = weight_sync
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

    # ---- what follows from them -----------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.policy_config, make=plugins().hook.rlplug_make_tokenizer)

    @cached_property
    def spec(self) -> PolicySpec:
        spec = load_spec(self.policy_config, self.tokenizer)
        if self.weight_sync.transform is None:
            return spec
        return replace(spec, fp8=choose_fp8_weights(meta_model(spec.path), self.weight_sync))

    @cached_property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of what the policy may call in its environment."""
        if self.make_environment is None:
            return ()
        environment = self.make_environment()
        try:
            return environment.tools()
        finally:
            environment.close()

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
                "Set trainer.strategy to rlplug.distributed.strategy.RLFSDP2Strategy, on one device too."
            )
        return strategy

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
