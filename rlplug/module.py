"""``RLModule``: the RL loop. Read :meth:`RLModule.training_step` first: it is the algorithm, phase after phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlplug.batching import BatchPlan, BatchSizes
from rlplug.errors import ConfigError, RunError
from rlplug.interfaces.algorithm import Algorithm
from rlplug.interfaces.optimization import Effect, Optimization
from rlplug.interfaces.reward import Reward
from rlplug.interfaces.rollout import Placement, PolicySpec, RolloutEngine, require_capability
from rlplug.metrics import rollout_metrics
from rlplug.ops.mismatch import mismatch_metrics
from rlplug.phases import PhaseClock, StopRequested, StopSignal
from rlplug.plugin_manager import plugins
from rlplug.policy import PolicyConfig, load_model, load_spec, load_tokenizer
from rlplug.prompt_stream import PromptStream
from rlplug.rewards import RewardRunner
from rlplug.rng import rng_state, set_rng_state
from rlplug.rollout.driver import EngineDriver
from rlplug.rollout.hf import HFRollout
from rlplug.strategy import RLFSDP2Strategy
from rlplug.types import Batch, Prompt, Rollout, Sample, SamplingParams
from rlplug.update import NonFiniteUpdate, PolicyUpdate
from rlplug.validation import ValidationConfig, validation_metrics

CHANGES_NOTHING: Final = ("prompts", "rollout", "rewards", "filter", "logprobs", "advantages")
"""Phases after which Ctrl-C can give the step up: no weight has changed."""


class RLModule(LightningModule):
    """Trains a policy on rewards.

    Args:
        policy: The model.
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
            than this, as the mean absolute difference of logprobs in nats. bf16 engines show 0.01 to 0.03.
        on_nonfinite: After a NaN or infinite loss or gradient, ``stop`` the run or ``skip`` that optimizer step. The
            batch is saved for inspection either way.
        reward_deadline_s: Longest time for one reward call.
        max_reward_error_share: The run stops when a larger share of a step's samples has no reward.
        sleep_between_rollouts: Let the engine give its device memory back while the policy is updated.
        sync_bucket_mib: Weights travel to the engine in buckets of at most this size.
        stall_s: Write Python stacks to stderr when one phase takes longer.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        algorithm: Algorithm,
        rewards: list[Reward],
        rollout: RolloutEngine | None = None,
        batch: BatchSizes = BatchSizes(),  # noqa: B008 - never changed
        sampling: SamplingParams = SamplingParams(),  # noqa: B008
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
        lr_scheduler: LRSchedulerCallable | None = None,
        optimizations: list[Optimization] | None = None,
        num_steps: int | None = None,
        max_grad_norm: float | None = 1.0,
        validation: ValidationConfig = ValidationConfig(),  # noqa: B008
        seed: int = 0,
        mismatch_gate: float = 0.1,
        on_nonfinite: Literal["stop", "skip"] = "stop",
        reward_deadline_s: float = 30.0,
        max_reward_error_share: float = 0.1,
        sleep_between_rollouts: bool = False,
        sync_bucket_mib: int = 1024,
        stall_s: float = 1800.0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy_config = policy
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
        self.on_nonfinite = on_nonfinite
        self.sleep_between_rollouts = sleep_between_rollouts
        self.sync_bucket_bytes = sync_bucket_mib << 20
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
        self.run_dir: Path | None = None
        self.stop_signal = StopSignal()
        self._is_first_step = True
        self._reference: list[nn.Module] = []  # in a list, so that it is not part of the checkpoint

    # ---- the loop -------------------------------------------------------------------------------------------------

    def training_step(self, tick: Any, batch_idx: int) -> None:
        """One RL step: eight phases. The data loader only drives the loop; prompts come from the stream."""
        self.step = self.rollout_step + 1
        with self.given_up_on_ctrl_c():
            rollout = Rollout()
            for refill in range(1 + self.algorithm.max_refills):
                with self.phase("prompts"):
                    prompts = self.stream.take(self.plan.prompts_per_step - rollout.num_groups)
                with self.phase("rollout"):
                    samples = self.generate(prompts, first_group=refill * self.plan.prompts_per_step)
                with self.phase("rewards"):
                    samples = self.score(samples)
                with self.phase("filter"):
                    rollout = self.keep_selected(rollout, samples)
                if rollout.num_groups == self.plan.prompts_per_step:
                    break
            with self.phase("logprobs"):
                batch = self.compute_logprobs(rollout)
            with self.phase("advantages"):
                batch = self.compute_advantages(batch)
            with self.phase("update"):
                self.update(batch)
            with self.phase("publish"):
                self.publish()
            self.validate_if_due()
            self.log_step()

    def generate(self, prompts: list[Prompt], first_group: int) -> list[Sample]:
        """Return completions of this rank's share of ``prompts``, from an engine with the newest weights."""
        key = f"{self.seed}/{self.step}"
        return self.driver.complete(prompts, self.plan.group_size, self.sampling, key, self.policy_version, first_group)

    def score(self, samples: list[Sample]) -> list[Sample]:
        """Score this rank's samples and return those of all ranks."""
        samples = self.strategy.gather(self.rewards.score(samples))
        if failed := [sample for sample in samples if sample.errors]:
            self.newest_samples.append(("reward_errors", self.step, failed))
        self.rewards.check(samples)
        self.step_metrics |= self.rewards.stats()
        return samples

    def keep_selected(self, rollout: Rollout, samples: list[Sample]) -> Rollout:
        """Add the groups that the algorithm wants to train on."""
        groups = Rollout(tuple(samples)).groups()
        parts: dict[bool, list[Sample]] = {True: [], False: []}
        for group, wanted in zip(groups, self.algorithm.select(groups), strict=True):
            parts[wanted] += group
        rollout = Rollout(rollout.samples + tuple(parts[True]), rollout.rejected + tuple(parts[False]))
        self.step_metrics |= rollout_metrics(rollout)
        return rollout

    def compute_logprobs(self, rollout: Rollout) -> Batch:
        """Make the batch, with the logprobs that the update needs; at a run's first step, compare with the engine's."""
        if not rollout.samples:
            raise RunError(
                f"step {self.step}: {type(self.algorithm).__name__} accepted none of the groups, after "
                f"{self.algorithm.max_refills} refills: every prompt is solved or hopeless. Use other prompts."
            )
        self.newest_samples.append(("train", self.step, rollout.samples))
        self.step_metrics |= self._observe("rlplug_after_rollout", rollout=rollout)
        batch = Batch.from_samples(rollout.samples, self.spec.pad_token_id)
        if self._is_first_step or not self.plan.is_on_policy:
            old_logprobs, sampled = self.updater.forward_only(self.policy, batch)
            self._compare_with_engine(batch, sampled)
            if not self.plan.is_on_policy:
                batch = batch.replace(old_logprobs=old_logprobs)
        for reference in self._reference:
            batch = batch.replace(ref_logprobs=self.updater.forward_only(reference, batch)[0])
        return batch

    def compute_advantages(self, batch: Batch) -> Batch:
        """Let the algorithm turn rewards into advantages, and plugins edit the result."""
        result = self.algorithm.advantages(batch)
        self.step_metrics |= result.metrics
        batch = batch.replace(advantages=result.advantages, returns=result.returns)
        edited: Batch = plugins().hook.rlplug_prepare_batch(batch=batch, step=self.step)
        return edited

    def update(self, batch: Batch) -> None:
        """Take the step's optimizer steps."""
        try:
            metrics, sampled = self.updater.run(batch, self.optimizers(), self.manual_backward)
        except NonFiniteUpdate as problem:
            self._save_for_inspection(batch)
            raise RunError(
                f"step {self.step}: {problem}. The batch is in {self._inspection_file}; weights and "
                "checkpoints are as before. Lower the learning rate or max_grad_norm, or set model.on_nonfinite: skip."
            ) from None
        if metrics["policy/skipped_updates"]:
            self._save_for_inspection(batch)
        if self.plan.is_on_policy:
            self.step_metrics |= mismatch_metrics(batch.rollout_logprobs, sampled, batch.response_mask)
        self.step_metrics |= metrics

    def publish(self) -> None:
        """Make the new weights the ones that the next rollout must have."""
        self.policy_version += 1
        self.rollout_step = self.step
        self._is_first_step = False
        scheduler: Any = self.lr_schedulers()
        self.step_metrics["policy/lr"] = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        if scheduler is not None:
            scheduler.step()

    def validate_if_due(self) -> None:
        """Score the held-out prompts, when ``validation`` says so."""
        if self.validation.is_due(self.rollout_step) and self.val_prompts:
            with self.phase("validate"):
                self.step_metrics |= self._validate()

    def log_step(self) -> None:
        """Hand the step's metrics to plugins and loggers, and end the run after its last step or Ctrl-C."""
        metrics = {**self.step_metrics, **self.driver.drain_metrics(), **self.clock.drain()}
        metrics["throughput/tokens_per_s"] = metrics["completion/num_tokens"] / metrics["time/step"]
        metrics |= self._observe("rlplug_after_update", metrics=MappingProxyType(metrics))
        self._send_to_loggers(metrics)
        stop = self.strategy.any_rank(self.stop_signal.is_set)
        self.trainer.should_stop = stop or self.rollout_step >= self.total_steps
        self.newest_metrics, self.step_metrics = metrics, {}

    # ---- parts of phases ------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; at its end, honour a Ctrl-C while nothing has changed yet."""
        with self.clock.phase(name):
            yield
        if name in CHANGES_NOTHING and self.strategy.any_rank(self.stop_signal.is_set):
            raise StopRequested

    @contextmanager
    def given_up_on_ctrl_c(self) -> Iterator[None]:
        """End the run as if the step had not begun, when Ctrl-C comes before its update."""
        stream, rng = self.stream.state_dict(), rng_state()
        try:
            yield
        except StopRequested:
            self.stream.load_state_dict(stream)
            set_rng_state(rng)
            self.trainer.should_stop = True

    def _compare_with_engine(self, batch: Batch, sampled_logprobs: Any) -> None:
        """Measure the mismatch; at a run's first step it is a gate."""
        metrics = mismatch_metrics(batch.rollout_logprobs, sampled_logprobs, batch.response_mask)
        self.step_metrics |= metrics
        if self._is_first_step and not metrics["mismatch/mean"] <= self.mismatch_gate:
            raise RunError(
                f"{type(self.engine).__name__} and the trainer disagree on the same tokens and weights: mean "
                f"|difference of logprobs| {metrics['mismatch/mean']:.4f}, maximum {metrics['mismatch/max']:.3f}, gate "
                f"{self.mismatch_gate}. Look for other weights, dtype, temperature or chat template in the engine; "
                "model.mismatch_gate sets the limit."
            )

    def _validate(self) -> dict[str, float]:
        sampling = self.validation.sampling(self.sampling.max_new_tokens)
        key = f"validate/{self.seed}"
        samples = self.score(
            self.driver.complete(self.val_prompts, self.validation.num_samples, sampling, key, self.policy_version)
        )
        self.newest_samples.append(("validate", self.step, samples))
        return validation_metrics(samples, self.validation.pass_threshold)

    def _observe(self, hook: str, **arguments: Any) -> dict[str, float]:
        """Call an observation hook and return the metrics that plugins add."""
        added = getattr(plugins().hook, hook)(step=self.step, **arguments)
        return {name: value for extra in added for name, value in extra.items()}

    def _send_to_loggers(self, metrics: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.step)
        self.log_dict(metrics, logger=False)  # for callbacks such as EarlyStopping

    @property
    def _inspection_file(self) -> Path:
        return (self.run_dir or Path(".")) / "nonfinite" / f"step-{self.step:08d}.safetensors"

    def _save_for_inspection(self, batch: Batch) -> None:
        """Write the step's batch, one tensor per field of :class:`Batch`."""
        if self.global_rank == 0:
            self._inspection_file.parent.mkdir(parents=True, exist_ok=True)
            save_file(batch.tensors(), self._inspection_file)

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

    def setup(self, stage: str) -> None:
        """Check what can be checked before anything is loaded."""
        if self.algorithm.needs.critic:
            raise ConfigError(f"{type(self.algorithm).__name__} needs a critic, which this version cannot train yet.")
        if self.sleep_between_rollouts:
            engines = plugins().registry.classes("rollouts").values()
            require_capability(self.engine, "sleep", "model.sleep_between_rollouts", engines)
        self.clock = PhaseClock(self.strategy.root_device, self.stall_s)
        if stage == "fit":
            if self.sampling.is_greedy:
                raise ConfigError(
                    "model.sampling.temperature is 0: completions of a prompt would all be the same, and nothing "
                    "could be learned from comparing them. Set it to 1."
                )
            self.plan = BatchPlan(self.batch_sizes, self.trainer.world_size)
            self.plan.check_longest(self.stream.longest_prompt + self.sampling.max_new_tokens)

    def configure_model(self) -> None:
        """Build, optimise and shard the policy, and the reference policy when the algorithm needs one."""
        if hasattr(self, "policy"):
            return  # Lightning calls this for every fit and validate
        policy = load_model(self.policy_config)
        for optimization in self.optimizations:
            optimization.before_shard(policy)
        self.policy = self._sharded(policy)
        for optimization in self.optimizations:
            optimization.after_shard(self.policy)
            effects = optimization.effects()
            if not effects:
                raise ConfigError(
                    f"{type(optimization).__name__} took no effect on {self.policy_config.path}: remove it from "
                    "model.optimizations."
                )
            self.effects += effects
        if self.algorithm.needs.reference_policy:
            self._reference = [self._sharded(load_model(self.policy_config)).requires_grad_(False).eval()]

    def _sharded(self, model: nn.Module) -> nn.Module:
        model.to(self.strategy.root_device)
        self.strategy.shard(model, self.policy_config.torch_dtype)
        return model

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.policy.parameters())
        if self.make_lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_lr_scheduler(optimizer)}

    def on_train_start(self) -> None:
        self._start_engine()
        self.updater = PolicyUpdate(
            policy=self.policy,
            algorithm=self.algorithm,
            plan=self.plan,
            strategy=self.strategy,
            sampling=self.sampling,
            hook=plugins().hook,
            max_grad_norm=self.max_grad_norm,
            skip_nonfinite=self.on_nonfinite == "skip",
            seed=self.seed,
        )
        self.stop_signal.install()
        if self.rollout_step >= self.total_steps:
            self.trainer.should_stop = True
        elif self.rollout_step == 0 and self.validation.is_due(0) and self.val_prompts:
            with self.clock.phase("validate"):
                metrics = self._validate()
            for logger in self.loggers:
                logger.log_metrics(metrics, step=self.step)

    def on_train_end(self) -> None:
        self.stop_signal.uninstall()

    def on_validation_start(self) -> None:
        self._start_engine()

    def validation_step(self, tick: Any, batch_idx: int) -> None:
        """``rlplug validate``: score all held-out prompts at once."""
        metrics = self._validate()
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.step)
        self.log_dict(metrics, logger=False)

    def teardown(self, stage: str) -> None:
        self.stop_signal.uninstall()
        self.engine.close()

    def _start_engine(self) -> None:
        self.driver = EngineDriver(
            engine=self.engine,
            policy=self.policy,
            spec=self.spec,
            placement=Placement(self.strategy.root_device, self.global_rank, self.trainer.world_size),
            tokenizer=self.tokenizer,
            hook=plugins().hook,
            sleeps=self.sleep_between_rollouts,
            bucket_bytes=self.sync_bucket_bytes,
        )

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rlplug"] = {
            "rollout_step": self.rollout_step,
            "policy_version": self.policy_version,
            "rng": self.strategy.gather([rng_state()]),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["rlplug"]
        self.rollout_step = self.step = state["rollout_step"]
        self.policy_version = state["policy_version"]
        set_rng_state(state["rng"][self.global_rank % len(state["rng"])])
