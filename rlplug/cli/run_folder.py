"""Run folder, with configuration, versions, metrics, samples, trained policy and report."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning.pytorch import Callback, Trainer

from rlplug.cli.compile_cache import DEFAULT as DEFAULT_COMPILE_CACHE
from rlplug.cli.resume import Changes
from rlplug.cli.run_files import METRICS, REWARD_ERRORS, SAMPLES, cut_back
from rlplug.cli.run_output import print_interrupted, print_samples, print_start, print_summary, print_validation
from rlplug.cli.run_record import RECORD, RunRecord
from rlplug.distributed.checkpoint_files import CONFIG, run_dir_of
from rlplug.distributed.checkpoint_writer import CONFIG_KEY
from rlplug.distributed.durable_files import (
    FolderLock,
    RowFile,
    new_numbered_folder,
    remove,
    replace_folder,
    require_readable,
    write_file,
)
from rlplug.errors import ConfigError, RunError
from rlplug.evaluation.card import write_card
from rlplug.launch.plan import RUN_FOLDER_VARIABLE
from rlplug.models.export import export_policy
from rlplug.models.lora.files import export_adapter
from rlplug.observability.advice import advise
from rlplug.observability.loggers import PrometheusLogger
from rlplug.observability.loggers.experiment_log import is_due, log_configuration, log_histograms, log_samples
from rlplug.observability.loggers.tensorboard import RunTensorBoard
from rlplug.observability.metrics_csv import MetricsCSV
from rlplug.observability.report.run_data import read_metrics
from rlplug.observability.sample_records import first_of_ranks, sample_record, write_records
from rlplug.observability.start import Compilation, start_line
from rlplug.observability.terminal import say
from rlplug.observability.timeline import timeline_of
from rlplug.observability.token_log.files import FOLDER as TOKENS
from rlplug.observability.token_log.files import TokenLogWriter
from rlplug.rollout.partial.replay import FILE as GROUPS
from rlplug.setup import take_optimizer_options
from rlplug.training.advantages import advantage_values
from rlplug.training.samples.sample_log import SampleLog
from rlplug.training.samples.token_capture import TokenCapture
from rlplug.types import Sample

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


MOST_ERRORS: Final = 100
"""Samples written to ``reward_errors.jsonl`` per step."""


class RunFolder(Callback):
    """Writer of the run's folder, ``<dir>/001``, ``<dir>/002``, ...; a resumed run continues its own.

    Args:
        dir: Parent folder of the run's numbered folder.
        samples_per_step: Completions written to ``samples.jsonl`` per step: the best, the worst and some in between.
        export_policy: Write the trained policy as a Hugging Face folder, ``policy/``, when the run ends; with
            ``model.lora`` the merged policy, and its adapter in ``adapter/`` as peft reads it.
        report: Write ``report.html`` when the run ends; needs the extra ``rlplug[report]``.
        token_samples_per_step: Completions per step of which ``tokens/`` gets the numbers of each token, and
            ``samples.jsonl`` the text: as many whole groups as fit, or else the first of a group. 0 writes none.
        token_every_n_steps: Steps from one with tokens to the next; the first step has some too.
        token_log_mib: Size of ``tokens/``, in MiB, beyond which its oldest steps are removed.
        compile_cache: Folder where the command line keeps what torch.compile, Triton and the engine compile, for later
            runs to load. Environment variables such as ``TORCHINDUCTOR_CACHE_DIR`` win over it; ``null`` leaves all to
            the libraries.
    """

    def __init__(
        self,
        dir: str = "runs/default",
        samples_per_step: int = 4,
        export_policy: bool = True,
        report: bool = True,
        token_samples_per_step: int = 8,
        token_every_n_steps: int = 1,
        token_log_mib: int = 1024,
        compile_cache: str | None = DEFAULT_COMPILE_CACHE,
    ) -> None:
        self.dir = dir
        self.samples_per_step = samples_per_step
        self.token_samples_per_step = token_samples_per_step
        self.token_every_n_steps = token_every_n_steps
        self.token_log_mib = token_log_mib
        self.compile_cache = compile_cache
        self.export_policy = export_policy
        self.report = report
        self.config_yaml: str | None = None
        """Resolved configuration as YAML; the command line sets it."""
        self.resumed_from: str | None = None
        """Path of the checkpoint from which the run resumes; the command line sets it."""
        self.changes = Changes({})
        """Keys that changed since that checkpoint; the command line sets them."""
        self.cache_note: str | None = None
        """Where compiled code is kept; the command line, which has set the variables, sets it."""
        self.path = Path()
        """The run's own folder, once it is chosen in ``setup``."""
        self._began = 0.0
        self._record: RunRecord
        self._metrics: MetricsCSV | None = None
        self._rows: dict[str, RowFile] = {}
        """Files of samples, by name."""
        self._prometheus: list[PrometheusLogger] = []
        self._samples: SampleLog
        self._lock: FolderLock | None = None
        self._is_accepted = False
        """Whether the run writes to its folder: a new one at once, a resumed one from its first step on."""

    # ---- the beginning --------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        module: Any = pl_module
        folder, problem = self._own_folder(trainer) if trainer.is_global_zero else (Path(), None)
        self.path, problem = trainer.strategy.broadcast((folder, problem))
        if problem is not None:
            raise RunError(problem)
        module.run_dir = self.path
        self._prometheus = [logger for logger in trainer.loggers if isinstance(logger, PrometheusLogger)]
        if problem := trainer.strategy.broadcast(self._open_ports() if trainer.is_global_zero else None):
            raise ConfigError(problem)
        self._metrics = MetricsCSV(self.path / METRICS, waits=self._is_resumed(trainer))
        self._rows = {name: RowFile(self.path / name) for name in (SAMPLES, REWARD_ERRORS, GROUPS)}
        tokens = TokenLogWriter(self.path / TOKENS, self.token_log_mib << 20)
        self._samples = SampleLog(self.samples_per_step, self._rows[SAMPLES], tokens)
        if self.token_samples_per_step and stage == "fit":
            module.token_capture = TokenCapture(
                self.token_samples_per_step,
                self.token_every_n_steps,
                module.config.engine.capabilities.logprobs,
                module.config.sampling.is_truncated,
            )
        trainer.loggers = [self._metrics, *trainer.loggers]
        if importlib.util.find_spec("tensorboard"):
            trainer.loggers = [*trainer.loggers, RunTensorBoard(self.path, name="", version="tensorboard")]
        if trainer.is_global_zero:
            self._record = RunRecord(self.path / RECORD, stage, trainer, self.cache_note)
            if not self._is_resumed(trainer):
                self._accept(trainer, module)

    def _open_ports(self) -> str | None:
        """Let Prometheus's loggers listen; return what is wrong with one, which all ranks must hear."""
        try:
            for logger in self._prometheus:
                logger.start_run(self.path)
        except ConfigError as error:
            return str(error)
        return None

    def _is_resumed(self, trainer: Trainer) -> bool:
        """Return whether the run goes on in the folder of its checkpoint."""
        return trainer.state.fn == "fit" and self.resumed_from is not None and run_dir_of(self.resumed_from) is not None

    def _own_folder(self, trainer: Trainer) -> tuple[Path, str | None]:
        """Return the folder of the run that is resumed, else a new one, locked; or why there is none."""
        try:
            resumed = run_dir_of(self.resumed_from) if self.resumed_from and self._is_resumed(trainer) else None
            launched = os.environ.get(RUN_FOLDER_VARIABLE)
            folder = resumed or (Path(launched) if launched else new_numbered_folder(Path(self.dir)))
            self._lock = FolderLock(folder)
            require_readable(folder / name for name in (CONFIG, RECORD, METRICS, SAMPLES, REWARD_ERRORS, GROUPS))
        except RunError as error:
            return Path(), str(error)
        return folder, None

    def _accept(self, trainer: Trainer, module: Any) -> None:
        """Begin to write to the folder: nothing can refuse the configuration any more."""
        if self._is_accepted or not trainer.is_global_zero:
            return
        self._is_accepted = True
        if self.config_yaml is not None:
            write_file(self.path / CONFIG, self.config_yaml)
        self._record.write()
        if self._is_resumed(trainer):
            assert self._metrics is not None
            step, validation = module.rollout_step, module.config.validation
            for line in cut_back(self.path, self._metrics, step, validation, bool(self.samples_per_step)):
                say(line)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        if module.strategy.gather([self.changes.has_optimizer_options])[0]:
            steps = [module.policy_version, module.rollout_step][: len(trainer.optimizers)]
            take_optimizer_options(module.config, module.models, trainer.optimizers, module.schedulers, steps)
        if not trainer.is_global_zero:
            return
        self._began = time.monotonic()
        if self.config_yaml is not None:
            log_configuration(trainer.loggers, self.config_yaml)
        self._record.add_plan(module)
        if self._is_accepted:
            self._record.write()
        for line in self.changes.lines:
            say(line)
        if self.cache_note is not None:
            say(self.cache_note, wraps=True)
        print_start(module, self._record.values["prompts"], self.path)

    # ---- each step ------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._accept(trainer, pl_module)  # the engine has started too
        self._follow_engines(pl_module)

    def _follow_engines(self, module: Any) -> None:
        for logger in self._prometheus:
            logger.follow_engines(module.config.engine.scrape_targets())

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[CONFIG_KEY] = self.config_yaml
        self._sync_rows()  # a run that goes on from the checkpoint cannot write them again

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._log_samples(trainer, pl_module)
        module: Any = pl_module
        if module.start_timer.is_running and module.rollout_step == module.step:  # no interrupt took the step back
            self._end_start(trainer, module)
        schedule = None if module.partial_rollout is None else module.partial_rollout.schedule
        if trainer.is_global_zero and schedule is not None and schedule.taken and schedule.step == module.rollout_step:
            phases, engine = module.timer.pop_spans(), module.run.generator.pop_timeline()
            self._rows[GROUPS].append(schedule.line(timeline_of(phases, engine)))

    def _end_start(self, trainer: Trainer, module: Any) -> None:
        """Record how long the start took, up to the end of the first step, and say it."""
        module.start_timer.end()
        if trainer.is_global_zero:
            seconds, compilation = module.start_timer.seconds, Compilation.so_far()
            self._record.values["start"] = {
                "seconds": {name: round(each, 2) for name, each in seconds.items()},
                "compilation": {name: round(each, 2) for name, each in asdict(compilation).items()},
            }
            self._record.write()
            say(start_line(seconds, module.newest_metrics, compilation), wraps=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._follow_engines(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_samples(trainer, pl_module)
        if trainer.is_global_zero:
            print_validation(trainer.callback_metrics, self.path)
            self._finish("finished")

    def _log_samples(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write some of the module's new samples, and those whose reward failed. Collective."""
        module: Any = pl_module
        taken, module.newest_samples = module.newest_samples, []
        for phase, step, samples in taken:
            if phase == "reward_errors":
                failed = first_of_ranks(samples, MOST_ERRORS, module.strategy)
                if trainer.is_global_zero:
                    self._append_errors(failed, step)
                continue
            batch = module.newest_batch if phase == "train" else None
            chosen = self._samples.write(phase, step, samples, batch, module)
            if not trainer.is_global_zero:
                continue
            if phase == "validate":
                print_samples(chosen, step)
            if phase == "validate" or is_due(step, module.plan.total_steps):
                log_samples(trainer.loggers, chosen, step, phase)
                if phase == "train":
                    advantages = {} if batch is None else {"advantage": advantage_values(batch)}
                    log_histograms(trainer.loggers, module.newest_values | advantages, step)

    def _append_errors(self, samples: Sequence[Sample], step: int) -> None:
        write_records(self._rows[REWARD_ERRORS], [sample_record(sample, step, "reward_errors") for sample in samples])

    def _sync_rows(self) -> None:
        assert self._metrics is not None
        self._metrics.sync()
        for file in self._rows.values():
            file.sync()
        self._samples.tokens.sync()

    # ---- the end --------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        self._accept(trainer, module)  # a run that had no step left
        self._log_samples(trainer, module)  # of a validation at its start
        if module.stop_signal.number is not None:
            if trainer.is_global_zero:
                self._finish("interrupted", f"stopped by {module.stop_signal.name} after step {module.rollout_step}")
                print_interrupted(module, self.path)
            return
        if self.export_policy:
            self._export(trainer, module)
        if trainer.is_global_zero:
            self._finish("finished")
            seconds = time.monotonic() - self._began
            advice = advise(read_metrics(self.path, []), self._record.values)
            print_summary(self.path, MetricsCSV(self.path / METRICS), seconds, advice, self._results())

    def _export(self, trainer: Trainer, module: Any) -> None:
        """Write the policy and, where one was trained, its adapter. Collective."""
        config, inputs, rank = module.config, module.inputs, trainer.global_rank
        partial = {name: self.path / f"{name}.partial" for name in ("policy", "adapter")}
        if trainer.is_global_zero:
            for folder in partial.values():
                remove(folder)
        by = config.model_trainer
        export_policy(module.policy, inputs.tokenizer, inputs.spec.dtype, partial["policy"], rank, by)
        if config.lora is not None:
            export_adapter(module.policy, config.lora, config.policy, partial["adapter"], rank)
        if trainer.is_global_zero:
            for name, folder in partial.items():
                if folder.exists():
                    replace_folder(folder, self.path / name)
                    if self.config_yaml is not None:
                        write_card(self.path, self.path / name)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._is_accepted:
            module: Any = pl_module
            failed = [taken for taken in module.newest_samples if taken[0] == "reward_errors"]
            with suppress(RunError):  # the disk may be full, which the exception says
                for _, step, samples in failed:  # of this rank: others may have ended
                    self._append_errors(samples[:MOST_ERRORS], step)
                self._finish("failed", f"{type(exception).__name__}: {exception}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._lock is not None:
            self._lock.close()

    def _finish(self, status: str, message: str | None = None) -> None:
        self._sync_rows()
        self._record.finish(status, message)

    def _results(self) -> list[str]:
        """Write the report, and say where results are."""
        lines = [f"policy: {self.path / 'policy'}"] if self.export_policy else []
        lines += [f"adapter: {self.path / 'adapter'}"] if (self.path / "adapter").exists() else []
        if self.report and importlib.util.find_spec("plotly"):
            from rlplug.observability.report.page import write_report

            lines.append(f"report: {write_report(self.path)}")
        elif self.report:
            lines.append(f"no report: pip install 'rlplug[report]', then rlplug report {self.path}")
        return lines
