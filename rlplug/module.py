"""``RLModule``: the RL loop. Read :meth:`RLModule.training_step` first: it is the algorithm, phase after phase.

Who computes what in its phases ``logprobs`` and ``update``: ``learners.py``, ``objectives.py``, ``passes.py`` and
``update.py``, in this order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from safetensors.torch import save_file
from torch import Tensor

from rlplug.distributed.host_tuning import freeze_gc
from rlplug.distributed.rng import rng_state, set_rng_state
from rlplug.errors import RunError
from rlplug.observability.phase_timer import StopRequested
from rlplug.ops import mismatch_metrics
from rlplug.plugin_manager import plugins
from rlplug.setup import RLModuleSetup
from rlplug.training.rollout_metrics import rollout_metrics
from rlplug.training.update import NonFiniteUpdate
from rlplug.training.validation import validation_metrics
from rlplug.types import Batch, Prompt, Rollout, Sample

CHANGES_NOTHING: Final = ("prompts", "rollout", "rewards", "filter", "logprobs", "advantages")
"""Phases after which Ctrl-C can give the step up: no weight has changed."""


class RLModule(RLModuleSetup):
    """Trains a policy on rewards; its options are those of :class:`rlplug.config.RLModuleOptions`."""

    def training_step(self, tick: Any, batch_idx: int) -> None:
        """One RL step: eight phases. The data loader only drives the loop; prompts come from the stream."""
        self.step = self.rollout_step + 1
        with self.rollback_on_interrupt():
            rollout = Rollout()
            for refill in itertools.count():
                with self.phase("prompts"):
                    prompts = self.stream.take(self.num_prompts_wanted(rollout))
                with self.phase("rollout"):
                    samples = self.generate(prompts, rollout)
                with self.phase("rewards"):
                    samples = self.score(samples)
                with self.phase("filter"):
                    rollout = self.filter_groups(rollout, samples, refill)
                if not self.wants_refill(rollout, refill):
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

    def num_prompts_wanted(self, rollout: Rollout) -> int:
        """Return how many prompts to draw: for the groups that ``rollout`` lacks, with the algorithm's reserve."""
        if self.in_flight is not None:
            return self.in_flight.num_wanted(self.plan.prompts_per_step)
        return math.ceil((self.plan.prompts_per_step - rollout.num_groups) * self.algorithm.over_sampling)

    def generate(self, prompts: list[Prompt], rollout: Rollout) -> list[Sample]:
        """Return completions of this rank's share of ``prompts``, from an engine with the newest weights.

        In a partial rollout: of those in flight, new and old, what is complete.
        """
        how = (self.plan.group_size, self.sampling, f"{self.seed}/{self.step}", self.policy_version)
        if self.in_flight is None:
            return self.player.complete(prompts, *how, first_group=rollout.num_drawn)
        return self.player.go_on(
            self.in_flight, prompts, *how, num_wanted=self.plan.prompts_per_step - rollout.num_groups
        )

    def score(self, samples: list[Sample]) -> list[Sample]:
        """Score this rank's samples and return those of all ranks."""
        samples = sorted(self.strategy.gather(self.rewards.score(samples)), key=lambda sample: sample.group)
        if failed := [sample for sample in samples if sample.errors]:
            self.newest_samples.append(("reward_errors", self.step, failed))
        self.step_metrics |= self.rewards.stats()
        return samples

    def filter_groups(self, rollout: Rollout, samples: list[Sample], refill: int) -> Rollout:
        """Add the samples that the algorithm wants to train on, from as many groups as a step takes."""
        num_missing = self.plan.prompts_per_step - rollout.num_groups
        for group in Rollout(tuple(samples)).groups():
            if num_missing == 0:
                rollout = rollout.with_surplus(group)
                continue
            chosen = self.algorithm.select(group)
            rollout = rollout.with_group(group, chosen)
            num_missing -= bool(chosen)
        if not rollout.drawn:
            return rollout
        self.rewards.check(rollout.drawn)  # of all rounds: one error in a small refill is no large share of the step
        self.step_metrics["filter/refills"] = float(refill)
        self.step_metrics["filter/missing_groups"] = num_missing / self.plan.prompts_per_step
        self.step_metrics |= rollout_metrics(rollout)
        return rollout

    def wants_refill(self, rollout: Rollout, refill: int) -> bool:
        """Return whether to generate once more before the update; ``refill`` counts from 0."""
        if rollout.num_groups == self.plan.prompts_per_step:
            return False
        if self.in_flight is not None and not rollout.drawn:
            return True  # each round brings those in flight nearer to their end
        return refill < self.algorithm.max_refills

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
        if self.in_flight is not None:
            self.step_metrics |= self.in_flight.metrics(batch, self.policy_version)
        learners, passes = self.learners, self.updater.passes
        needs_old_logprobs = learners.needs_old_logprobs(self.step, self.plan.is_on_policy)
        values: list[Tensor] = []
        if self._is_first_step or needs_old_logprobs or learners.shares_trunk:
            logprobs, sampled, *values = passes.forward_only(batch, learners.policy_pass)
            self._compare_with_engine(batch, sampled)
            batch = batch.replace(old_logprobs=logprobs if needs_old_logprobs else None)
        if learners.reference is not None:
            with self.offload.reference_on_device():
                batch = batch.replace(ref_logprobs=passes.forward_only(batch, learners.reference_pass)[0])
        if learners.critic is not None:
            batch = batch.replace(values=(values or passes.forward_only(batch, learners.critic_pass))[0])
        return batch

    def compute_advantages(self, batch: Batch) -> Batch:
        """Let the algorithm turn rewards into advantages, and plugins edit the result."""
        result = self.algorithm.advantages(batch)
        self.step_metrics |= result.metrics
        mask = batch.response_mask if result.response_mask is None else result.response_mask
        batch = batch.replace(advantages=result.advantages, returns=result.returns, response_mask=mask)
        edited: Batch = plugins().hook.rlplug_prepare_batch(batch=batch, step=self.step)
        return edited

    def update(self, batch: Batch) -> None:
        """Take the step's optimizer steps."""
        self.offload.before_update()
        try:
            result = self.updater.run(batch, self.learners.objectives(self.step), self.step)
        except NonFiniteUpdate as problem:
            self._save_for_inspection(batch)
            raise RunError(
                f"step {self.step}: {problem}. The batch is in {self._inspection_file}; the newest checkpoint "
                "is from before. Lower the learning rate or max_grad_norm, or set model.on_nonfinite: skip."
            ) from None
        if result.metrics["policy/skipped_updates"]:
            self._save_for_inspection(batch)
        if result.sampled_logprobs is not None:
            self._compare_with_engine(batch, result.sampled_logprobs)
        self.step_metrics |= result.metrics

    def publish(self) -> None:
        """Make the new weights the ones that the next rollout must have."""
        self.policy_version += self.learners.policy_trains(self.step)
        self.rollout_step = self.step
        if self._is_first_step:
            freeze_gc()  # what was compiled
        self._is_first_step = False
        for trainee in self.learners.trainees(self.step):
            self.step_metrics[f"{trainee.name}/lr"] = trainee.optimizer.param_groups[0]["lr"]
            if trainee.scheduler is not None:
                trainee.scheduler.step()

    def validate_if_due(self) -> None:
        """Score the held-out prompts, when ``validation`` says so."""
        if self.validation.is_due(self.rollout_step) and self.val_prompts:
            with self.phase("validate"):
                self.step_metrics |= self._validate()

    def log_step(self) -> None:
        """Hand the step's metrics to algorithm, plugins and loggers; end the run after its last step or Ctrl-C."""
        metrics = {
            **self.step_metrics,
            **self.driver.pop_metrics(),
            **self.player.pop_metrics(),
            **self.offload.pop_metrics(),
            **self.clock.pop_metrics(),
        }
        metrics["throughput/tokens_per_s"] = metrics["completion/num_tokens"] / metrics["time/step"]
        self.algorithm.after_step(metrics)
        metrics |= self._observe("rlplug_after_update", metrics=MappingProxyType(metrics))
        self._send_to_loggers(metrics)
        stop = self.strategy.any_rank(self.stop_signal.is_set)
        self.trainer.should_stop = stop or self.rollout_step >= self.total_steps
        self.newest_metrics, self.step_metrics = metrics, {}

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.rollout_step >= self.total_steps:
            self.trainer.should_stop = True
        elif self.rollout_step == 0 and self.validation.is_due(0) and self.val_prompts:
            with self.clock.phase("validate"):
                metrics = self._validate()
            for logger in self.loggers:
                logger.log_metrics(metrics, step=self.step)

    def validation_step(self, tick: Any, batch_idx: int) -> None:
        """``rlplug validate``: score all held-out prompts at once."""
        metrics = self._validate()
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.step)
        self.log_dict(metrics, logger=False, sync_dist=True)

    # ---- parts of phases ------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; at its end, honour a Ctrl-C while nothing has changed yet."""
        with self.clock.phase(name):
            yield
        if name in CHANGES_NOTHING and self.strategy.any_rank(self.stop_signal.is_set):
            raise StopRequested

    @contextmanager
    def rollback_on_interrupt(self) -> Iterator[None]:
        """End the run as if the step had not begun, when Ctrl-C comes before its update."""
        stream, rng = self.stream.state_dict(), rng_state()
        in_flight = [] if self.in_flight is None else self.in_flight.state_dict()
        try:
            yield
        except StopRequested:
            self.stream.load_state_dict(stream)
            set_rng_state(rng)
            if self.in_flight is not None:
                self.in_flight.load_state_dict(in_flight, self.stream.by_uid)
            self.trainer.should_stop = True
        self.offload.after_step()

    def _compare_with_engine(self, batch: Batch, sampled_logprobs: Tensor) -> None:
        """Measure how far engine and trainer are apart; in a run's first step, or in every one, that is a gate."""
        if not self.engine.capabilities.logprobs:
            return
        assert batch.policy_versions is not None
        mask = batch.response_mask & (batch.policy_versions == self.policy_version)  # those of former ones may differ
        if self.in_flight is not None and not mask.any():
            return
        self.step_metrics |= mismatch_metrics(batch.rollout_logprobs, sampled_logprobs, mask)
        if self.mismatch_gate is None or not (self._is_first_step or self.gate_every_step):
            return
        mean, largest = self.step_metrics["mismatch/mean"], self.step_metrics["mismatch/max"]
        if not mean <= self.mismatch_gate:
            raise RunError(
                f"step {self.step}: {type(self.engine).__name__} and the trainer disagree on the same tokens and "
                f"weights: mean |difference of logprobs| {mean:.4f}, maximum {largest:.3f}, gate {self.mismatch_gate}. "
                "Look for other weights, dtype, temperature or chat template in the engine; model.mismatch_gate sets "
                "the limit."
            )

    def _validate(self) -> dict[str, float]:
        # rollout/... and environment/... in the log are of the training rollout
        self.step_metrics |= self.driver.pop_metrics() | self.player.pop_metrics()
        sampling = self.validation.sampling(self.sampling.max_new_tokens)
        key = f"validate/{self.seed}"
        samples = self.score(
            self.player.complete(self.val_prompts, self.validation.num_samples, sampling, key, self.policy_version)
        )
        self.rewards.check(samples)
        of_sync = {name: value for name, value in self.driver.pop_metrics().items() if name.startswith("sync/")}
        self.step_metrics |= of_sync
        self.player.pop_metrics()
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
