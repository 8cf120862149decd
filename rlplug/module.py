"""``RLModule``: the RL loop. Read :meth:`RLModule.training_step` first: it is the algorithm, phase after phase.

The phase ``update`` goes on in ``training/update.py``, down to the algorithm's loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import OptimizerCallable
from numpy.typing import NDArray
from torch import nn

from rlplug import setup as run_setup
from rlplug.config import RunConfig
from rlplug.data.datamodule import PromptDataModule
from rlplug.data.prompt_encoder import PromptRules
from rlplug.data.prompt_stream import require_same_prompts
from rlplug.distributed.rng import rng_state, set_rng_state
from rlplug.distributed.stop_signal import StopRequested, StopSignal, end_at_once
from rlplug.distributed.strategy import RLFSDP2Strategy, require_strategy
from rlplug.errors import RunError
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.metrics import MetricsOfStep
from rlplug.interfaces.checks.process_state import watched
from rlplug.interfaces.observer import StepRecord, Validation
from rlplug.models.build import Models
from rlplug.models.lm_head import TokenLogprobs
from rlplug.observability.observers import Observers
from rlplug.observability.phase_timer import PHASES_BEFORE_UPDATE, PhaseTimer
from rlplug.observability.start import FIRST_STEP, StartTimer, watch_compilation
from rlplug.plugin_manager import plugins
from rlplug.recording.run_folder import RunFolder
from rlplug.rollout.generator import RolloutRequest
from rlplug.training.advantages import compute_advantages
from rlplug.training.host_tuning import freeze_gc, limit_host_threads
from rlplug.training.logprobs import compute_logprobs
from rlplug.training.mismatch_gate import MismatchGate
from rlplug.training.samples.importance_weights import weights_by_age
from rlplug.training.samples.metrics import means_over_ranks, rollout_metrics, source_metrics
from rlplug.training.samples.selection import GroupSelection
from rlplug.training.samples.table import sample_table
from rlplug.training.update import NonFiniteUpdate, PolicyUpdate, save_for_inspection
from rlplug.training.validation.validator import Validator, log_late
from rlplug.types import Prompt, Rollout, Sample, StepBatch

MYPY = False  # as TYPE_CHECKING, whose imports jsonargparse carries out to read the constructor
if MYPY:
    from rlplug.rollout.partial.state import PartialRolloutState
    from rlplug.training.samples.token_capture import TokenCapture
    from rlplug.training.streaming.step import StreamedStep


class RLModule(LightningModule):
    """Trains a policy on rewards.

    Args:
        optimizer: Called with the policy's parameters.
        options: The other fields of :class:`rlplug.config.RunConfig`.
    """

    validator: Validator
    """Scores held-out prompts. It is there once training or validation has started, what follows with training."""
    groups: GroupSelection
    """Selects a step's groups, by the algorithm."""
    policy_update: PolicyUpdate
    streamed: StreamedStep | None
    """Trains on a step's groups as they complete, with ``partial_rollout.max_staleness: 0``."""
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
        super().__init__()
        self.start_timer = StartTimer()
        self.automatic_optimization = False
        config = self.config = RunConfig(optimizer=optimizer, **options)
        self.rewards = run_setup.make_rewards(config)
        self.partial_rollout: PartialRolloutState | None = None
        """Groups that go on in the next step."""
        if config.partial_rollout is not None:
            from rlplug.rollout.partial.state import PartialRolloutState

            self.partial_rollout = PartialRolloutState(config.partial_rollout, config.batch.prompts_per_step)
        self.models = Models()
        self.timer = PhaseTimer(config.limits.stall_s, deadline_s=config.limits.phase_deadline_s)
        self.stop_signal = StopSignal()

        self.rollout_step = 0
        """RL steps done; Lightning's ``global_step`` counts optimizer steps."""
        self.step = 0
        """Number of the step that runs, from 1: in metrics, samples, hooks and messages."""
        self.policy_version = 0
        self.step_metrics = MetricsOfStep()
        self._late_scores: dict[str, float] = {}
        """Of the former step's policy, where a validation ran beside this step."""
        self._validation_was_cut = False
        self._step_values: dict[str, NDArray[Any]] = {}
        """Rewards and lengths of all ranks' samples of the step that runs."""
        self.token_capture: TokenCapture | None = None
        """Keeps values of single tokens for the token log; the run folder sets it."""
        self.run_dir: Path | None = None
        self._is_first_step = True
        self.schedulers: list[Any] = []
        self._plan: run_setup.RunPlan | None = None
        self._run: run_setup.Run | None = None

    # ---- the step -------------------------------------------------------------------------------------------------

    def training_step(self, tick: Any, batch_idx: int) -> None:
        """Take one RL step: eight phases. The data loader only drives the loop; prompts come from the stream."""
        self.step = self.rollout_step + 1
        self.observers.engine_started(self.config.engine.scrape_targets())
        if self.token_capture is not None:
            self.token_capture.begin(self.step)
        with self.rollback_on_interrupt():
            self.validator.begin_step(self.rollout_step, self.policy_version)
            rollout = Rollout()
            while self.groups.wants_more(rollout):
                with self.phase("prompts"):
                    prompts = self.take_prompts(rollout)
                with self.phase("rollout"):
                    samples = self.generate(prompts, rollout)
                with self.phase("rewards"):
                    samples = self.score(samples)
                with self.phase("filter"):
                    rollout = self.filter_groups(rollout, samples)
                if self.streamed is not None:
                    with self.phase("update"):
                        self.add_gradients(rollout, self.streamed)
            with self.phase("logprobs"):
                batch = self.compute_logprobs(rollout)
            with self.phase("advantages"):
                batch = self.compute_advantages(batch)
            with self.phase("update"):
                self.update(batch)
            with self.phase("publish"):
                self.publish()
            validations = self.validate_if_due()
            self.log_step(rollout, batch, validations)

    def take_prompts(self, rollout: Rollout) -> list[Prompt]:
        """Return the next training prompts, the same on every rank."""
        stream = self.data.train_stream
        prompts = stream.take(self.groups.num_prompts_wanted(rollout))
        if stream.num_prompts is None:  # each rank has read them anew, perhaps from a server
            require_same_prompts(prompts, self.strategy.gather, self.step)
        return prompts

    def generate(self, prompts: list[Prompt], rollout: Rollout) -> list[Sample]:
        """Return this rank's share of completions of ``prompts``, or of the groups that a partial rollout completes."""
        config, key = self.config, f"{self.config.seed}/{self.step}"
        request = RolloutRequest(prompts, config.batch.group_size, config.sampling, key, self.policy_version)
        if self.partial_rollout is None:
            return self.run.generator.generate(request, first_group=rollout.num_drawn)
        self.partial_rollout.schedule.begin(self.step)
        return self.run.generator.resume(self.partial_rollout, request, self.groups.num_missing(rollout))

    def score(self, samples: list[Sample]) -> list[Sample]:
        """Return this rank's samples with their rewards."""
        samples = sorted(self.rewards.score(samples), key=lambda sample: sample.group)
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
            self.step_metrics |= rollout_metrics(table, self.rewards.names) | source_metrics(table, sources)
            self._step_values = {"reward": table["reward"], "completion_length": table["num_tokens"]}
        return rollout

    def add_gradients(self, rollout: Rollout, streamed: StreamedStep) -> None:
        """Run the passes over the newest groups while others are generated; ``update`` ends with the optimizer step."""
        streamed.add(rollout, self.step, self._is_first_step, self.groups.awaits_groups)

    def compute_logprobs(self, rollout: Rollout) -> StepBatch:
        """Make the batch, with the logprobs that the update needs; at a run's first step, compare with the engine's."""
        if not rollout.num_groups:
            algorithm = self.config.algorithm
            raise RunError(
                f"step {self.step}: {type(algorithm).__name__} accepted none of the groups, after "
                f"{algorithm.max_refills} refills: every prompt is solved or hopeless. Use other prompts."
            )
        rollout = rollout.by_group()
        self.data.train_stream.observe(rollout.drawn, self.strategy.gather_arrays)
        self._observe_rollout(rollout)
        if self.streamed is not None:
            batch, tokens = self.streamed.rows(), None
        else:
            update, offload = self.policy_update, self.run.offload
            batch, tokens = compute_logprobs(
                self._batch(rollout.samples), update.models, update.runner, offload, self.step, self._is_first_step
            )
        if self.partial_rollout is not None:
            self.step_metrics |= self.partial_rollout.metrics(batch, self.policy_version)
        if tokens is not None:
            self._compare_with_engine(batch, tokens)
        return batch

    def compute_advantages(self, batch: StepBatch) -> StepBatch:
        """Let the algorithm turn rewards into advantages, and plugins edit the result."""
        algorithm = self.config.algorithm
        batch, metrics = compute_advantages(algorithm, batch, self.strategy.gather)
        self.step_metrics.add(PluginCall(algorithm, "advantages"), metrics)
        if self.streamed is not None:
            self.streamed.require_advantages(batch)
        edited: StepBatch = plugins().hook.rlplug_prepare_batch(batch=batch, step=self.step)
        return edited

    def update(self, batch: StepBatch) -> None:
        """Take the step's optimizer steps."""
        self.run.offload.before_update()
        name = f"step-{self.step:08d}-rank-{self.global_rank}.safetensors"
        inspection_file = (self.run_dir or Path(".")) / "nonfinite" / name
        try:
            streamed = self.streamed
            result = self.policy_update.run(batch, self.step) if streamed is None else streamed.finish()
        except NonFiniteUpdate as problem:
            save_for_inspection(batch, inspection_file)
            raise RunError(
                f"step {self.step}: {problem}. The batch is in {inspection_file}; the newest checkpoint is from "
                "before. Lower the learning rate or model.limits.max_grad_norm, or set model.limits.on_nonfinite: skip."
            ) from None
        if result.metrics["policy/skipped_updates"]:
            save_for_inspection(batch, inspection_file)
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

    def validate_if_due(self) -> list[Validation]:
        """Score the held-out prompts, when ``validation`` says so, and return the validations that have ended.

        Those that were generated beside the step get their scores logged at the former step, to which they belong. A
        run that is told to stop meanwhile validates when it is resumed.
        """
        ended: list[Validation] = []
        self._validation_was_cut = True
        with suppress(StopRequested):
            for validation in self.validator.end_step(self.step, self.policy_version, self.is_last_step):
                ended.append(validation)
                if validation.step != self.step:
                    self._late_scores = dict(validation.scores)
                    log_late(self.loggers, validation.scores, validation.step)
            self._validation_was_cut = False
        return ended

    def log_step(self, rollout: Rollout, batch: StepBatch, validations: Sequence[Validation]) -> None:
        """Hand the step to algorithm, plugins, loggers and observers; end the run after its last step or a stop."""
        metrics = self.step_metrics
        for validation in validations:
            metrics |= validation.scores if validation.step == self.step else {}
        # a validation keeps those of the step's own rollout, in place of which the run has the validation's by now
        metrics |= self.run.pop_metrics() | self.validator.pop_metrics() | self.timer.pop_metrics()
        metrics |= self.rewards.pop_counts(self.strategy) | self.data.train_stream.metrics()
        metrics |= {"throughput/tokens_per_s": metrics["completion/num_tokens"] / metrics["time/step"]}
        call = PluginCall(self.config.algorithm, "after_step")
        with watched(call):
            self.config.algorithm.after_step(MappingProxyType(metrics))
        for given in plugins().observe("rlplug_after_update", step=self.step, metrics=MappingProxyType(metrics)):
            metrics.add(given.call, given)
        self._log(metrics)
        known = self._late_scores | metrics
        found = {name: torch.tensor(value) for name, value in {**known, "step": float(self.step)}.items()}
        self.trainer.callback_metrics.update(found)  # what log_dict does, which takes 0.4 ms a metric
        is_told = self.strategy.agree_to_stop(self.stop_signal)
        self.trainer.should_stop = is_told or self.is_last_step
        samples, values = rollout.by_group().samples, MappingProxyType(self._step_values)
        self.observers.step_ended(StepRecord(self.step, MappingProxyType(known), samples, batch, values))
        for validation in validations:
            self.observers.validated(validation)
        self.step_metrics, self._late_scores, self._step_values = MetricsOfStep(), {}, {}

    # ---- parts of phases ------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; at its end, honour a request to stop while nothing has changed yet."""
        with self.timer.phase(name), plugins().costs.during(name):
            yield
        if name in PHASES_BEFORE_UPDATE and self.strategy.agree_to_stop(self.stop_signal):
            raise StopRequested

    @contextmanager
    def rollback_on_interrupt(self) -> Iterator[None]:
        """End the run as if the step had not begun, when it is told to stop before the update."""
        self.run.generator.pause()
        stream, rng = self.data.state_dict(), rng_state()
        groups = None if self.partial_rollout is None else self.partial_rollout.snapshot()
        try:
            yield
        except StopRequested:
            self.data.load_state_dict(stream)
            set_rng_state(rng)
            if self.streamed is not None:
                self.streamed.discard()
            if self.partial_rollout is not None and groups is not None:
                self.run.generator.pause()
                self.partial_rollout.restore(groups)
            self.trainer.should_stop = True
        self.run.offload.after_step()

    def _batch(self, samples: Sequence[Sample]) -> StepBatch:
        spec = self.inputs.spec
        no_experts = None if spec.routers is None else spec.routers.empty(0)
        return StepBatch.from_samples(samples, self.strategy.statistics, no_experts)

    def _observe_rollout(self, rollout: Rollout) -> None:
        """Show plugins this rank's samples, and add their metrics of all ranks."""
        samples = rollout.samples
        found = plugins().observe("rlplug_after_rollout", step=self.step, rollout=rollout) if samples else []
        for given in means_over_ranks(found, len(samples), self.strategy.gather):
            self.step_metrics.add(given.call, given)

    def _compare_with_engine(self, batch: StepBatch, tokens: TokenLogprobs) -> None:
        """Measure how far engine and trainer are apart; see :class:`MismatchGate`."""
        if self.token_capture is not None:
            self.token_capture.compared(tokens.sampled_logprobs)
        if self.config.engine.capabilities.logprobs:
            self.step_metrics |= self.mismatch_gate.compare(
                batch, tokens.sampled_logprobs, self.policy_version, self.step, self._is_first_step
            )
            if self.config.partial_rollout is not None and (bound := self.config.partial_rollout.bound) is not None:
                self.step_metrics |= weights_by_age(batch, tokens.sampled_logprobs, self.policy_version, bound)

    def _log(self, metrics: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.step)

    # ---- the parts of the run, in the order in which Lightning asks for them ---------------------------------------

    @cached_property
    def inputs(self) -> run_setup.RunInputs:
        """Tokenizer, policy specification and tools, read from files at the first use."""
        return run_setup.read_inputs(self.config)

    @property
    def prompt_rules(self) -> PromptRules:
        """Rules that prompts must keep; the data module asks for them in its ``setup``, before this one's."""
        return self.inputs.prompt_rules(self.config.sampling.max_new_tokens)

    def setup(self, stage: str) -> None:
        """Check what can be checked before anything is loaded, and plan a training."""
        self.start_timer.begin("checks")
        watch_compilation()
        self.timer.device = self.strategy.root_device
        run_setup.check_machine(self.config, self.inputs, self.strategy)
        if stage != "fit":
            run_setup.check_rollout(self.config, self.inputs)
            return
        self._plan = run_setup.plan_fit(self.config, self.inputs, self.data, self.strategy, self.trainer.world_size)
        if self.partial_rollout is not None:
            data, group_size = self.data.train_stream.state_dict()["fingerprint"], self.config.batch.group_size
            self.partial_rollout.identify(self.config.seed, data, group_size, self._plan.total_steps)

    def configure_callbacks(self) -> list[Callback]:
        """Have a trainer that was made in Python record the run as the command line's does."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(each, RunFolder) for each in callbacks):
            callbacks.insert(0, RunFolder())  # others ask for the run's folder
        return []

    def configure_model(self) -> None:
        self.start_timer.begin("models")
        plan = self._plan if self.trainer.state.fn == "fit" else None
        run_setup.build_models(self.models, self.config, self.inputs, plan, self.strategy)

    def configure_optimizers(self) -> Any:
        optimizers, self.schedulers = run_setup.make_optimizers(self.config, self.models)
        return optimizers, [scheduler for scheduler in self.schedulers if scheduler is not None]

    def on_train_start(self) -> None:
        self._start_run()
        self.stop_signal.install(self.strategy.store, self.global_rank)
        self._make_training_parts()
        limit_host_threads(self.strategy.root_device)
        freeze_gc()
        self.observers.engine_started(self.config.engine.scrape_targets())
        if self.is_last_step:
            self.trainer.should_stop = True
        if self._validation_was_cut or (self.rollout_step == 0 and not self.is_last_step):
            self.start_timer.begin("first validation")
            for validation in self.validate_if_due():
                if validation.step == self.step:  # a late one has its scores logged
                    log_late(self.loggers, validation.scores, validation.step)
                self.observers.validated(validation)
            self.step_metrics |= self.validator.pop_metrics()  # its weight sync; a rollout follows for the rest
        self.start_timer.begin(FIRST_STEP)

    def on_validation_start(self) -> None:
        self._start_run()
        self.observers.engine_started(self.config.engine.scrape_targets())

    def validation_step(self, tick: Any, batch_idx: int) -> None:
        """``rlplug validate``: score all held-out prompts at once."""
        validation = self.validator.run(self.step, self.policy_version)
        metrics = {**validation.scores, **self.rewards.pop_counts(self.strategy)}
        self._log(metrics)
        self.log_dict(metrics, logger=False, sync_dist=True)
        self.observers.validated(validation)

    def teardown(self, stage: str) -> None:
        self.stop_signal.uninstall()
        if self._run is not None:
            self._run.generator.close()

    def _start_run(self) -> None:
        """Start the engine, and what generates and validates with it."""
        self.start_timer.begin("engine start")
        end_at_once(self.global_rank)
        config, models, data, strategy = self.config, self.models, self.data, self.strategy
        sleeps = config.memory.sleep_between_rollouts is True if self._plan is None else self._plan.sleeps
        self._run = run_setup.start_run(
            config, self.inputs, sleeps, models, data, strategy, self.trainer.optimizers, self.stop_signal
        )
        self.timer.asleep_bytes = self._run.driver.asleep_bytes
        self.validator = Validator(
            config.validation,
            config.validation.sampling_of(config.sampling),
            config.seed,
            data,
            self._run.generator,
            self.score,
            self.rewards,
            strategy,
            self.phase,
        )

    def _make_training_parts(self) -> None:
        """Make what selects groups and trains on them."""
        config, strategy = self.config, self.strategy
        per_step = self.plan.batch.prompts_per_step
        self.groups = GroupSelection(config.algorithm, per_step, self.partial_rollout, strategy.gather_arrays)
        self.mismatch_gate = run_setup.make_mismatch_gate(config, self.inputs.spec, strategy.root_device)
        optimizers: Any = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.policy_update = run_setup.make_update(
            config,
            self.plan,
            self.models,
            strategy,
            optimizers,
            self.schedulers,
            self.manual_backward,
            self.token_capture,
        )
        streams = config.partial_rollout is not None and config.partial_rollout.streams
        self.streamed = None
        if streams:
            from rlplug.training.streaming.step import StreamedStep

            self.streamed = StreamedStep(self.policy_update, self.run.offload, self._batch)

    # ---- what is there by then -------------------------------------------------------------------------------------

    @property
    def plan(self) -> run_setup.RunPlan:
        assert self._plan is not None, "there is a plan after setup('fit')"
        return self._plan

    @property
    def is_last_step(self) -> bool:
        """Whether no step is left."""
        return self.rollout_step >= self.plan.total_steps

    @property
    def run(self) -> run_setup.Run:
        assert self._run is not None, "a run starts with training or validation"
        return self._run

    @property
    def policy(self) -> nn.Module:
        """The sharded policy."""
        assert self.models.policy is not None, "models are there after configure_model"
        return self.models.policy

    @property
    def data(self) -> PromptDataModule:
        data: PromptDataModule = self.trainer.datamodule  # type: ignore[attr-defined]
        return data

    @property
    def strategy(self) -> RLFSDP2Strategy:
        return require_strategy(self.trainer.strategy)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._run is not None:
            self._run.generator.pause()
        partial, gather = self.partial_rollout, self.strategy.gather
        checkpoint["rlplug"] = {
            "rollout_step": self.rollout_step,
            "policy_version": self.policy_version,
            "trainer": type(self.config.model_trainer).__name__,
            "adapters": self.models.adapters,
            "algorithm": self.config.algorithm.state_dict(),
            "partial_rollout": None if partial is None else partial.state_dict(gather),
            "validation_was_cut": self._validation_was_cut,
            "stepped": [bool(optimizer.state) for optimizer in self.trainer.optimizers],
            "rng": gather([rng_state()]),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["rlplug"]
        self.rollout_step = self.step = state["rollout_step"]
        self.policy_version = state["policy_version"]
        self._validation_was_cut = state.get("validation_was_cut", False)
        self.config.algorithm.load_state_dict(state["algorithm"])
        if self.trainer.state.fn == "fit":
            from rlplug.rollout.partial.state import load_partial_rollout

            groups, prompts = state["partial_rollout"], self.data.train_stream.by_uid
            limits = self.config.sampling.max_new_tokens, self.config.turns
            load_partial_rollout(self.partial_rollout, groups, prompts, self.policy_version, *limits)
        for optimizer, stepped in zip(self.trainer.optimizers, state["stepped"], strict=False):  # none to validate
            if not stepped:
                optimizer.state.clear()  # see RLFSDP2Strategy.optimizer_state
        set_rng_state(state["rng"][self.global_rank % len(state["rng"])])
