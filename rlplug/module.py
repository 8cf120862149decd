"""``RLModule``: the RL loop. Read :meth:`RLModule.training_step` first: it is the algorithm, phase after phase.

The phase ``update`` goes on in ``training/update.py``, down to the algorithm's loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import OptimizerCallable
from numpy.typing import NDArray

from rlplug.config import RunConfig
from rlplug.data.prompt_stream import require_same_prompts
from rlplug.distributed.rng import rng_state, set_rng_state
from rlplug.distributed.stop_signal import StopRequested
from rlplug.errors import RunError
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.metrics import MetricsOfStep
from rlplug.interfaces.checks.process_state import watched
from rlplug.interfaces.observer import StepRecord, Validation
from rlplug.models.lm_head import TokenLogprobs
from rlplug.observability.observers import Observers
from rlplug.observability.phase_timer import STOPPING_PHASES
from rlplug.observability.start import FIRST_STEP
from rlplug.plugin_manager import plugins
from rlplug.recording.run_folder import RunFolder
from rlplug.rollout.source import RolloutRequest
from rlplug.setup.build import make_step_training, make_update
from rlplug.setup.start import RunModule, freeze_gc, limit_host_threads, make_mismatch_gate, validation_request
from rlplug.training.advantages import compute_advantages
from rlplug.training.mismatch_gate import MismatchGate
from rlplug.training.samples.metrics import means_over_ranks, rollout_metrics, sample_table, scored_rows
from rlplug.training.samples.selection import GroupSelection
from rlplug.training.step_training import StepTraining
from rlplug.training.update import NonFiniteUpdate, PolicyUpdate, save_for_inspection
from rlplug.training.validation.validator import Validator, log_late
from rlplug.types import Prompt, Rollout, Sample, StepBatch

MYPY = False  # as TYPE_CHECKING, whose imports jsonargparse carries out to read the constructor
if MYPY:
    from rlplug.interfaces.token_log import TokenLog


class RLModule(RunModule):
    """Trains a policy on rewards.

    Args:
        optimizer: Called with the policy's parameters.
        options: The other fields of :class:`rlplug.config.RunConfig`.
    """

    validator: Validator
    """Scores held-out prompts."""
    groups: GroupSelection
    """Selects a step's groups, by the algorithm. It is there once training has started, as what follows."""
    policy_update: PolicyUpdate
    step_training: StepTraining
    """Trains on a step's groups: together, or as they complete."""
    mismatch_gate: MismatchGate
    """Compares engine and trainer."""
    observers: Observers
    """What sees each step. The run's recorder makes them in its ``setup``, which comes before this one's."""

    def __init__(
        self,
        # jsonargparse reads the default's source, so that --model.optimizer.init_args.lr alone works
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, fused=True),
        **options: Any,
    ) -> None:
        super().__init__(RunConfig(optimizer=optimizer, **options))
        self.automatic_optimization = False
        self.rollout_step = 0
        """RL steps done; Lightning's ``global_step`` counts optimizer steps."""
        self.step = 0
        """Number of the step that runs, from 1: in metrics, samples, hooks and messages."""
        self.policy_version = 0
        self.step_metrics = MetricsOfStep()
        self._step_values: dict[str, NDArray[Any]] = {}
        """Rewards and lengths of all ranks' samples of the step that runs."""
        self.token_log: TokenLog | None = None
        """Gets values of single tokens; the run folder sets it, where a plugin writes them."""
        self.run_dir: Path | None = None
        self._is_first_step = True

    # ---- the step -------------------------------------------------------------------------------------------------

    def training_step(self, tick: Any, batch_idx: int) -> None:
        """Take one RL step: nine phases. The data loader only drives the loop; prompts come from the stream."""
        self.step = self.rollout_step + 1
        self.observers.engine_started(self.config.engine.scrape_targets())
        if self.token_log is not None:
            self.token_log.begin(self.step)
        self.rewards.seconds = dict.fromkeys(self.rewards.seconds, 0.0)
        with self.rollback_on_interrupt():
            self.validator.begin_step(self.rollout_step, self.policy_version)
            rollout = Rollout()
            while self.groups.wants_more(rollout):
                with self.phase("prompts"):
                    prompts = self.take_prompts(rollout)
                with self.phase("sync"):
                    self.source.sync_weights(self.policy_version)
                with self.phase("rollout"):
                    samples = self.generate(prompts, rollout)
                with self.phase("rewards"):
                    samples = self.score(samples, trains=True)
                with self.phase("filter"):
                    rollout = self.filter_groups(rollout, samples)
                # where groups train as they complete, their passes run here, in the phase "update"
                self.step_training.add(rollout, self.step, self._is_first_step, self.groups.awaits_groups)
            with self.phase("logprobs"):
                batch = self.compute_logprobs(rollout)
            with self.phase("advantages"):
                batch = self.compute_advantages(batch)
            with self.phase("update"):
                self.update(batch)
            with self.phase("publish"):
                self.publish()
            validations = self.validator.end_step(self.step, self.policy_version, self.is_last_step)
            self.log_step(rollout, batch, validations)

    def take_prompts(self, rollout: Rollout) -> list[Prompt]:
        """Return the next training prompts, the same on every rank."""
        stream = self.data.train_stream
        prompts = stream.take(self.groups.num_prompts_wanted(rollout))
        if stream.num_prompts is None:  # each rank has read them anew, perhaps from a server
            require_same_prompts(prompts, self.strategy.gather, self.step)
        return prompts

    def generate(self, prompts: list[Prompt], rollout: Rollout) -> list[Sample]:
        """Return this rank's share of samples of the next groups: those of ``prompts``, or some that went on."""
        config, key = self.config, f"{self.config.seed}/{self.step}"
        request = RolloutRequest(prompts, config.batch.group_size, config.sampling, key, self.policy_version)
        return self.source.next_groups(request, self.groups.num_missing(rollout), rollout.num_drawn)

    def score(self, samples: list[Sample], trains: bool = False) -> list[Sample]:
        """Return this rank's samples with their rewards, which are scaled only where they train."""
        samples = sorted(self.rewards.score(samples), key=lambda sample: sample.group)
        samples = self.rewards.scale(samples, self.strategy.gather_arrays) if trains else samples
        failed = [sample for sample in samples if sample.errors]
        if self.strategy.any_rank(bool(failed)):
            self.observers.rewards_failed(self.step, failed)
        self.step_metrics |= self.rewards.stats()
        return samples

    def filter_groups(self, rollout: Rollout, samples: list[Sample]) -> Rollout:
        """Add the groups that the algorithm wants to train on; stop when too many samples have no reward."""
        rollout = self.groups.add(rollout, samples)
        if rollout.num_drawn and not self.groups.awaits_groups:
            # of all rounds: one error in a small refill is no large share of a step
            self.rewards.check(rollout.drawn, self.strategy)
            sources = self.data.train_stream.sources
            table = sample_table(rollout, self.rewards.names, self.strategy.gather_arrays, sources)
            self.step_metrics |= self.groups.metrics(rollout)
            self.step_metrics |= {f"reward_seconds/{name}": each for name, each in self.rewards.seconds.items()}
            self.step_metrics |= rollout_metrics(table, self.rewards.names, sources)
            scored = scored_rows(table)
            self._step_values = {"reward": scored["reward"], "completion_length": scored["num_tokens"]}
        return rollout

    def compute_logprobs(self, rollout: Rollout) -> StepBatch:
        """Make the batch, with the logprobs that the update needs; at a run's first step, compare with the engine's."""
        self.groups.require_some(rollout, self.step)
        rollout = rollout.by_group()
        self.data.train_stream.observe(rollout.drawn, self.strategy.gather_arrays)
        self._observe_rollout(rollout)
        batch, tokens = self.step_training.logprobs(rollout, self.step, self._is_first_step)
        self.step_metrics |= self.source.metrics(batch, self.policy_version)
        if tokens is not None:
            self._compare_with_engine(batch, tokens)
        return batch

    def compute_advantages(self, batch: StepBatch) -> StepBatch:
        """Let the algorithm turn rewards into advantages, and plugins edit the result."""
        algorithm = self.config.algorithm
        batch, metrics = compute_advantages(algorithm, batch, self.strategy.gather)
        self.step_metrics.add(PluginCall(algorithm, "advantages"), metrics)
        self.step_training.require_advantages(batch)
        edited: StepBatch = plugins().hook.rlplug_prepare_batch(batch=batch, step=self.step)
        return edited

    def update(self, batch: StepBatch) -> None:
        """Take the step's optimizer steps."""
        self.offload.before_update()
        file = (self.run_dir or Path(".")) / "nonfinite" / f"step-{self.step:08d}-rank-{self.global_rank}.safetensors"
        try:
            result = self.step_training.run(batch, self.step)
        except NonFiniteUpdate as problem:
            save_for_inspection(batch, file)
            raise RunError(
                f"step {self.step}: {problem}. The batch is in {file}; the newest checkpoint is from "
                "before. Lower the learning rate or model.limits.max_grad_norm, or set model.limits.on_nonfinite: skip."
            ) from None
        if result.metrics["policy/skipped_updates"]:
            save_for_inspection(batch, file)
        if result.tokens is not None:
            self._compare_with_engine(batch, result.tokens)
        self.step_metrics.add(PluginCall(self.config.algorithm, "loss"), result.metrics)

    def publish(self) -> None:
        """Make the new weights the ones that the next rollout must have."""
        self.policy_version += self.policy_update.models.policy_trains(self.step)
        self.rollout_step = self.step
        if self._is_first_step:
            freeze_gc()  # what was compiled
        self._is_first_step = False
        self.step_metrics |= self.policy_update.end_step(self.step)

    def log_step(self, rollout: Rollout, batch: StepBatch, validations: Sequence[Validation]) -> None:
        """Hand the step to algorithm, plugins, loggers and observers; end the run after its last step or a stop."""
        metrics, late_scores = self.step_metrics, dict[str, float]()
        for validation in validations:
            if validation.step == self.step:
                metrics |= validation.scores
            else:  # it was generated beside this step, and is of the policy before it
                late_scores |= validation.scores
                log_late(self.loggers, validation.scores, validation.step)
        # a validation keeps those of the step's own rollout, in place of which the source has the validation's by now
        metrics |= self.source.pop_metrics() | self.validator.pop_metrics()
        metrics |= self.offload.pop_metrics() | self.timer.pop_metrics()
        metrics |= self.rewards.pop_counts(self.strategy) | self.data.train_stream.metrics()
        metrics |= {"throughput/tokens_per_s": metrics["completion/num_tokens"] / metrics["time/step"]}
        with watched(PluginCall(self.config.algorithm, "after_step")):
            self.config.algorithm.after_step(MappingProxyType(metrics))
        for given in plugins().observe("rlplug_after_update", step=self.step, metrics=MappingProxyType(metrics)):
            metrics.add(given.call, given)
        self._log(metrics)
        known = late_scores | metrics
        found = {name: torch.tensor(value) for name, value in {**known, "step": float(self.step)}.items()}
        self.trainer.callback_metrics.update(found)  # what log_dict does, which takes 0.4 ms a metric
        self.trainer.should_stop = self.strategy.agree_to_stop(self.stop_signal) or self.is_last_step
        samples, values = rollout.by_group().samples, MappingProxyType(self._step_values)
        self.observers.step_ended(StepRecord(self.step, MappingProxyType(known), samples, batch, values))
        for validation in validations:
            self.observers.validated(validation)
        self.step_metrics, self._step_values = MetricsOfStep(), {}

    # ---- parts of phases ------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; at its end, honour a request to stop while nothing has changed yet."""
        with self.timer.phase(name), plugins().costs.during(name):
            yield
        if name in STOPPING_PHASES and self.strategy.agree_to_stop(self.stop_signal):
            raise StopRequested

    @contextmanager
    def rollback_on_interrupt(self) -> Iterator[None]:
        """End the run as if the step had not begun, when it is told to stop before the update."""
        self.source.begin_step(self.step)
        stream, rewards, rng = self.data.state_dict(), self.rewards.state_dict(), rng_state()
        try:
            yield
        except StopRequested:
            self.data.load_state_dict(stream)
            self.rewards.load_state_dict(rewards)
            set_rng_state(rng)
            self.step_training.discard()
            self.source.rollback()
            self.trainer.should_stop = True
        self.offload.after_step()

    def _observe_rollout(self, rollout: Rollout) -> None:
        """Show plugins this rank's samples, and add their metrics of all ranks."""
        samples = rollout.samples
        found = plugins().observe("rlplug_after_rollout", step=self.step, rollout=rollout) if samples else []
        for given in means_over_ranks(found, len(samples), self.strategy.gather):
            self.step_metrics.add(given.call, given)

    def _compare_with_engine(self, batch: StepBatch, tokens: TokenLogprobs) -> None:
        """Measure how far engine and trainer are apart; see :class:`MismatchGate`."""
        if self.token_log is not None:
            self.token_log.compared(tokens.sampled_logprobs)
        if self.config.engine.capabilities.logprobs:
            self.step_metrics |= self.mismatch_gate.compare(
                batch, tokens.sampled_logprobs, self.policy_version, self.step, self._is_first_step
            )

    def _log(self, metrics: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.step)

    # ---- the parts of the run, in the order in which Lightning asks for them ---------------------------------------

    def setup(self, stage: str) -> None:
        super().setup(stage)
        config, data, strategy = self.config, self.data, self.strategy
        request = validation_request(config)
        self.validator = Validator(
            config.validation, request, self.source, data, self.score, self.rewards, strategy, self.phase
        )

    def configure_callbacks(self) -> list[Callback]:
        """Have a trainer that was made in Python record the run as the command line's does."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(each, RunFolder) for each in callbacks):
            callbacks.insert(0, RunFolder())  # others ask for the run's folder
        return []

    def on_train_start(self) -> None:
        self.start_run()
        self.stop_signal.install(self.strategy.store, self.global_rank)
        self._make_training_parts()
        limit_host_threads(self.strategy.root_device)
        freeze_gc()
        self.observers.engine_started(self.config.engine.scrape_targets())
        if self.is_last_step:
            self.trainer.should_stop = True
        if self.validator.was_cut or (self.rollout_step == 0 and not self.is_last_step):
            self.start_timer.begin("first validation")
            for validation in self.validator.end_step(self.step, self.policy_version, self.is_last_step):
                log_late(self.loggers, validation.scores, validation.step)
                self.observers.validated(validation)
            self.step_metrics |= self.validator.pop_metrics()  # its weight sync; a rollout follows for the rest
        self.start_timer.begin(FIRST_STEP)

    def on_validation_start(self) -> None:
        self.start_run()
        self.observers.engine_started(self.config.engine.scrape_targets())

    def validation_step(self, tick: Any, batch_idx: int) -> None:
        """``rlplug validate``: score all held-out prompts at once."""
        validation = self.validator.run(self.step, self.policy_version)
        metrics = {**validation.scores, **self.rewards.pop_counts(self.strategy)}
        self._log(metrics)
        self.log_dict(metrics, logger=False, sync_dist=True)
        self.observers.validated(validation)

    def _make_training_parts(self) -> None:
        """Make what selects groups and trains on them."""
        parts, algorithm, strategy = self.parts, self.config.algorithm, self.strategy
        per_step = self.plan.batch.prompts_per_step
        self.groups = GroupSelection(algorithm, per_step, self.source, strategy.gather_arrays)
        self.mismatch_gate = make_mismatch_gate(self.config, self.inputs.spec, strategy.root_device)
        optimizers: Any = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.policy_update = make_update(
            parts, self.models, optimizers, self.schedulers, self.manual_backward, self.token_log
        )
        self.step_training = make_step_training(parts, self.source, self.policy_update, self.offload, self.phase)

    @property
    def is_last_step(self) -> bool:
        """Whether no step is left."""
        return self.rollout_step >= self.plan.total_steps

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.source.pause()
        checkpoint["rlplug"] = {
            "rollout_step": self.rollout_step,
            "policy_version": self.policy_version,
            "trainer": type(self.config.model_trainer).__name__,
            "adapters": self.models.adapters,
            "algorithm": self.config.algorithm.state_dict(),
            "rewards": self.rewards.state_dict(),
            "partial_rollout": self.source.state_dict(self.strategy.gather),
            "validation_was_cut": self.validator.was_cut,
            "stepped": [bool(optimizer.state) for optimizer in self.trainer.optimizers],
            "rng": self.strategy.gather([rng_state()]),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state, config = checkpoint["rlplug"], self.config
        self.rollout_step = self.step = state["rollout_step"]
        self.policy_version = state["policy_version"]
        self.validator.was_cut = state.get("validation_was_cut", False)
        config.algorithm.load_state_dict(state["algorithm"])
        self.rewards.load_state_dict(state.get("rewards", {}))
        if self.trainer.state.fn == "fit":
            groups, prompts = state["partial_rollout"], self.data.train_stream.by_uid
            limits = config.sampling.max_new_tokens, config.turns
            self.source.load_state_dict(groups, prompts, self.policy_version, *limits)
        for optimizer, stepped in zip(self.trainer.optimizers, state["stepped"], strict=False):  # none to validate
            if not stepped:
                optimizer.state.clear()  # see RLFSDP2Strategy.optimizer_state
        set_rng_state(state["rng"][self.global_rank % len(state["rng"])])
