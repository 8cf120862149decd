"""``RunConfig``: the options of a run, under ``model`` in its YAML: eleven parts, and ten groups of settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from rlplug.distributed.offload import OffloadMode
from rlplug.interfaces.algorithm import Algorithm
from rlplug.interfaces.environment import Environment
from rlplug.interfaces.optimization import Optimization
from rlplug.interfaces.reward import Reward
from rlplug.interfaces.rollout import RolloutEngine
from rlplug.interfaces.trainer import ModelConfig, ModelTrainer
from rlplug.models.critic import CriticConfig
from rlplug.models.lora.config import LoRAConfig
from rlplug.models.transformers_trainer import TransformersTrainer
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.hf_engine import HFRollout
from rlplug.training.batch_plan import BatchSizes
from rlplug.training.validation.config import ValidationConfig
from rlplug.types import SamplingParams
from rlplug.types.ranges import CountOrZero, Positive, Seconds, Seed, Share, Steps, check_ranges
from rlplug.weight_sync.config import WeightSyncConfig


@dataclass(frozen=True)
class MemoryConfig:
    """Memory settings that let trainer and engine fit on the same GPUs.

    Args:
        sleep_between_rollouts: Let the engine free its device memory while the policy is updated; ``auto`` does
            so when the memory plan says that update and engine do not fit together.
        offload: State that the trainer moves to host memory while the engine generates: none, the optimizers' state, or
            the weights and the reference policy as well.
        on_shortfall: When the memory plan of a GPU run does not fit, ``stop`` before anything is loaded, or ``warn``.
    """

    sleep_between_rollouts: bool | Literal["auto"] = "auto"
    offload: OffloadMode = "none"
    on_shortfall: Literal["stop", "warn"] = "stop"


@dataclass(frozen=True)
class Limits:
    """Limits beyond which a run clips, skips, restarts or stops.

    Args:
        max_grad_norm: Clip the policy's gradients to this global norm; ``null`` only measures it.
        mismatch_gate: The run stops when engine and trainer disagree on the sampled tokens by more than this, as the
            mean absolute difference of logprobs in nats. ``auto`` follows from the dtype: 0.1 in bfloat16 and FP8,
            whose engines show up to 0.04; 1e-4 in float32 on CPUs, 0.01 on GPUs. ``null`` only measures it.
        gate_every_step: Apply ``mismatch_gate`` in every step, and not only in a process's first one: proof that each
            weight sync sent the trained weights.
        on_nonfinite: After a NaN or infinite loss or gradient, ``stop`` the run or ``skip`` that optimizer step. The
            batch is saved for inspection either way.
        reward_deadline_s: Longest time for one reward call.
        max_reward_error_share: The run stops when a larger share of a step's samples has no reward.
        max_engine_restarts: Most restarts of engines in one rollout, after one died or missed a deadline.
        stall_s: Write Python stacks to stderr when one phase takes longer.
        phase_deadline_s: End the run when one phase takes longer, with a message that names the plugin whose call has
            not returned. ``null`` never does.
    """

    max_grad_norm: Positive | None = 1.0
    mismatch_gate: Positive | Literal["auto"] | None = "auto"
    gate_every_step: bool = True
    on_nonfinite: Literal["stop", "skip"] = "stop"
    reward_deadline_s: Seconds = 30.0
    max_reward_error_share: Share = 0.1
    max_engine_restarts: CountOrZero = 2
    stall_s: Seconds = 1800.0
    phase_deadline_s: Seconds | None = 14400.0

    def __post_init__(self) -> None:
        check_ranges(self, "model.limits")


@dataclass
class RunConfig:
    """The parts and settings of a run.

    Args:
        policy: The model.
        algorithm: Advantages and loss, by name: ``GRPO``.
        optimizer: Called with the policy's parameters.
        rewards: Their weighted sum trains, with what the environment gives, if there is one.
        trainer: Whose models are trained; ``TransformersTrainer``, Hugging Face's, by default.
        rollout: The engine; ``HFRollout``, transformers' own ``generate``, by default.
        critic: The value function, for an algorithm that needs one, such as PPO; ``{}`` takes every default.
        reference: The frozen model that a KL penalty holds the policy near; by default the policy's initial model.
        environment: Answers the policy after each turn, by name; every trajectory gets one of its own. By default
            a completion is one turn.
        lr_scheduler: Called with the optimizer; steps once per RL step that updates the policy.
        optimizations: Applied in order, before and after sharding; one without an effect stops the run.
        num_steps: RL steps to take; by default one pass over the training prompts.
        seed: Seeds completions and the order of mini-batches; 0 follows ``seed_everything``.
        batch: Global and per-GPU sizes.
        sampling: How training completions are drawn.
        turns: Limits of trajectories with an environment.
        partial_rollout: Let long trajectories continue in the next step; by default a step waits for all of its own.
        validation: When and how held-out prompts are scored.
        weight_sync: Dtype and bucket size in which weights are sent to the engine.
        memory: Settings that let trainer and engine fit on the same GPUs.
        limits: Limits beyond which a run clips, skips, restarts or stops.
        router_replay: In a mixture of experts, let the policy's routers take the experts that the engine chose for each
            token (R3, arXiv 2510.11370), which lowers the mismatch of engine and trainer.
        lora: Train low-rank adapters and keep the policy's own weights as they are; by default all of it trains.
    """

    policy: ModelConfig
    algorithm: Algorithm
    optimizer: OptimizerCallable
    rewards: list[Reward] = field(default_factory=list)
    trainer: ModelTrainer | None = None
    rollout: RolloutEngine | None = None
    critic: CriticConfig | None = None
    reference: ModelConfig | None = None
    environment: Callable[[], Environment] | None = None
    lr_scheduler: LRSchedulerCallable | None = None
    optimizations: list[Optimization] = field(default_factory=list)

    num_steps: Steps | None = None
    seed: Seed = 0
    batch: BatchSizes = field(default_factory=BatchSizes)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    turns: TurnOptions = field(default_factory=TurnOptions)
    partial_rollout: PartialRollout | None = None
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    limits: Limits = field(default_factory=Limits)
    router_replay: bool = False
    lora: LoRAConfig | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "model")
        self.validation.sampling_of(self.sampling)

    @cached_property
    def engine(self) -> RolloutEngine:
        """The rollout engine, transformers' own when none is named."""
        return self.rollout or HFRollout()

    @cached_property
    def model_trainer(self) -> ModelTrainer:
        """The trainer of the models, transformers' when none is named."""
        return self.trainer or TransformersTrainer()

    @property
    def reference_is_policy(self) -> bool:
        """Whether the reference policy is the policy without its adapters, so that there is no second copy."""
        return self.lora is not None and self.reference is None and self.algorithm.needs.reference_policy

    @property
    def on_policy_pass(self) -> str | None:
        """Why the policy runs once before each update even when that is exactly on-policy, in a few words."""
        if self.algorithm.needs.old_logprobs:
            return "the advantages of the algorithm need them"
        if self.critic is not None and self.critic.share_trunk:
            return "by the pass that computes values"
        return None
