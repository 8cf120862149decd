"""Run folder, with configuration, versions, metrics, samples, trained policy and report."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

from lightning.pytorch import Callback, Trainer

from rlplug.distributed.checkpoints.files import CONFIG, CONFIG_KEY, EXPORTED, has_key, run_dir_of
from rlplug.distributed.durable_files import FolderLock, RowFile, new_numbered_folder, require_readable, write_file
from rlplug.errors import ConfigError, RunError
from rlplug.interfaces.observer import ExperimentLog, ObservedRun, RunObserver, StepRecord, Validation
from rlplug.interfaces.rollout import ScrapeTargets
from rlplug.interfaces.token_log import TokenLogOptions
from rlplug.observability.metrics_log import MetricsLog, read_metrics
from rlplug.observability.observers import Observers
from rlplug.observability.sample_records import first_of_ranks, sample_record, write_records
from rlplug.observability.start import Compilation, start_line
from rlplug.observability.terminal import say
from rlplug.plugin_manager import plugins
from rlplug.plugin_names import missing_distribution
from rlplug.recording.provenance import PROVENANCE, ROWS, KeptRows, provenance
from rlplug.recording.run_output import print_interrupted, print_samples, print_start, print_summary, print_validation
from rlplug.recording.run_record import METRICS, RECORD, REWARD_ERRORS, SAMPLES, RunRecord
from rlplug.rollout.config import GROUPS
from rlplug.training.samples.sample_log import SampleLog
from rlplug.types import Sample
from rlplug.types.ranges import CountOrZero, Range, Steps, check_ranges

MYPY = False  # in place of TYPE_CHECKING, whose imports jsonargparse carries out
if MYPY:
    from lightning.pytorch import LightningModule

    from rlplug.recording.changes import Changes

DEFAULT_COMPILE_CACHE: Final = "~/.cache/rlplug/compile"
RUN_FOLDER_VARIABLE: Final = "RLPLUG_RUN_FOLDER"
"""Environment variable with the folder of a run, where whoever starts its ranks has made it."""
MOST_ERRORS: Final = 100
"""Samples written to ``reward_errors.jsonl`` per step."""


class RunFolder(Callback, RunObserver):
    """Writer of the run's folder, ``<dir>/001``, ``<dir>/002``, ...; a resumed run continues its own.

    Args:
        dir: Parent folder of the run's numbered folder.
        samples_per_step: Completions written to ``samples.jsonl`` per step: the best, the worst and some in between.
        export_policy: Write the trained policy as a Hugging Face folder, ``policy/``, when the run ends; with
            ``model.lora`` the merged policy, and its adapter in ``adapter/`` as peft reads it.
        report: Have plugins write their reports when the run ends, such as ``report.html``.
        token_samples_per_step: Completions per step of which ``tokens/`` gets the numbers of each token, where a plugin
            writes them, and ``samples.jsonl`` the text: as many whole groups as fit, or else the first of a group. 0
            writes none.
        token_every_n_steps: Steps from one with tokens to the next; the first step has some too.
        token_log_mib: Size of ``tokens/``, in MiB, beyond which its oldest steps are removed.
        allow_changes: What may differ from a checkpoint: ``data``, ``code``, ``versions`` or keys of ``model``.
        compile_cache: Folder where the command line keeps what torch.compile, Triton and the engine compile, for later
            runs to load; ``null`` leaves it to each library.
        verbose: Print the batch plan, the memory plan and where compiled code is kept, before the first step.
    """

    def __init__(
        self,
        dir: str = "runs/default",
        samples_per_step: CountOrZero = 4,
        export_policy: bool = True,
        report: bool = True,
        token_samples_per_step: CountOrZero = 8,
        token_every_n_steps: Steps = 1,
        token_log_mib: Annotated[int, Range(1, 10**9)] = 1024,
        compile_cache: str | None = DEFAULT_COMPILE_CACHE,
        verbose: bool = False,
        allow_changes: list[str] | None = None,
    ) -> None:
        self.dir = os.path.expanduser(dir)
        if re.match(r"~|\w+://|.*\$\w|[“”]", self.dir):  # a folder of that name would be made
            raise ConfigError(f"run.dir is {dir!r}: give the path of a folder; a variable in a file is ${{NAME}}.")
        self.samples_per_step, self.token_samples_per_step = samples_per_step, token_samples_per_step
        self.token_every_n_steps, self.token_log_mib = token_every_n_steps, token_log_mib
        check_ranges(self, "run")
        self.allow_changes = [] if allow_changes is None else allow_changes
        sections = ("data", "code", "versions", "model")
        if unknown := [key for key in self.allow_changes if key.partition(".")[0] not in sections]:
            raise ConfigError(f"run.allow_changes has {unknown[0]!r}: give data, code, versions, or keys of model.")
        self.compile_cache, self.verbose = compile_cache, verbose
        self.export_policy, self.report = export_policy, report
        self.config_yaml: str | None = None
        """Resolved configuration as YAML; the command line sets it."""
        self.resumed_from: str | None = None
        """Path of the checkpoint from which the run resumes; the command line sets it."""
        self.former_config: Mapping[str, Any] = {}
        """Configuration of that checkpoint; the command line sets it."""
        self.changes: Changes | None = None
        """What has changed since that checkpoint."""
        self._provenance: Mapping[str, Mapping[str, str]] = {}
        self._kept_rows, self._restored_rows = KeptRows(), dict[Path, Any]()
        self.cache_note: str | None = None
        """Where compiled code is kept; the command line, which has set the variables, sets it."""
        self.path = Path()
        """The run's own folder, once it is chosen in ``setup``."""
        self._began = 0.0
        self._record: RunRecord
        self._resumed: Path | None = None
        """Folder in which the run goes on, which is that of its checkpoint."""
        self._metrics: MetricsLog
        self._experiment_log: ExperimentLog
        self._rows: dict[str, RowFile] = {}
        """Files of samples, by name."""
        self._samples: SampleLog
        self._trainer: Trainer
        self._module: Any = None
        self._given: list[Callback] = []  # observers of plugins that are callbacks
        self._lock: FolderLock | None = None
        self._is_accepted = False
        """Whether the run writes to its folder: a new one at once, a resumed one from its first step on."""

    # ---- the beginning --------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        module: Any = pl_module
        self._trainer, self._module = trainer, module
        goes_on = stage == "fit" and self.resumed_from is not None
        self._resumed = run_dir_of(str(self.resumed_from)) if goes_on else None
        folder, problem = self._own_folder() if trainer.is_global_zero else (Path(), None)
        self.path, problem = trainer.strategy.broadcast((folder, problem))
        if problem is not None:
            raise RunError(problem)
        module.run_dir = self.path
        if trainer.is_global_zero:
            self._record = RunRecord(self.path / RECORD, stage, trainer, self.cache_note)
        if stage == "fit":
            self._compare(module)
        given = plugins().hook.rlplug_make_observer()
        callbacks = [each for each in module.trainer.callbacks if each not in self._given]
        module.observers = Observers((*callbacks, *trainer.loggers), given, module.strategy)
        self._given = [each for each in given if isinstance(each, Callback)]
        module.trainer.callbacks = [*callbacks, *self._given]
        module.observers.begin(ObservedRun(self.path, module.trainer.state.fn, trainer.is_global_zero, self.report))
        self._metrics = MetricsLog(self.path / METRICS, waits=self._resumed is not None)
        self._rows = {name: RowFile(self.path / name) for name in (SAMPLES, REWARD_ERRORS, GROUPS)}
        self._samples = SampleLog(self.samples_per_step, self._rows[SAMPLES])
        if stage == "fit":
            options = TokenLogOptions(self.token_samples_per_step, self.token_every_n_steps, self.token_log_mib << 20)
            module.token_log = plugins().hook.rlplug_make_token_log(
                folder=self.path,
                options=options,
                config=module.config,
                strategy=module.strategy,
                tokenizer=module.inputs.tokenizer,
            )
        made = plugins().hook.rlplug_make_experiment_log(folder=self.path, trainer=trainer)
        self._experiment_log = ExperimentLog() if made is None else made
        trainer.loggers = [self._metrics, *trainer.loggers, *self._experiment_log.loggers]
        if self._resumed is None:
            self._accept()

    def _compare(self, module: Any) -> None:
        """Record what decides the numbers; ``ConfigError`` where that may not differ from before. Collective."""
        problem = None
        if self._trainer.is_global_zero:
            self._provenance = provenance(module.config, module.data, self._record.values["versions"])
            if self.resumed_from is not None:
                from rlplug.recording.resumed_run import compare

                configs = self.former_config, self.config_yaml
                checkpoint, allowed = Path(self.resumed_from), self.allow_changes
                self.changes = compare(checkpoint, configs, self._provenance, module.config, allowed)
                self._record.values["changes"] = self.changes.recorded(self.path / RECORD)
                problem = self.changes.problem
        if (problem := module.strategy.broadcast(problem)) is not None:
            raise ConfigError(problem)
        module.data.train_stream.may_differ = "data" in self.allow_changes

    def _own_folder(self) -> tuple[Path, str | None]:
        """Return the folder of the run that is resumed, else a new one, locked; or why there is none."""
        try:
            launched = os.environ.get(RUN_FOLDER_VARIABLE)
            folder = self._resumed or (Path(launched) if launched else new_numbered_folder(Path(self.dir)))
            self._lock = FolderLock(folder)
            names = (CONFIG, RECORD, METRICS, SAMPLES, REWARD_ERRORS, GROUPS)
            require_readable([*(folder / name for name in names), *filter(Path.is_symlink, folder.iterdir())])
        except RunError as error:
            return Path(), str(error) if self._resumed else f"{error} Or set run.dir to another folder."
        return folder, None

    def _accept(self) -> None:
        """Begin to write to the folder: nothing can refuse the configuration any more."""
        if self._is_accepted or not self._trainer.is_global_zero:
            return
        self._is_accepted = True
        if self.config_yaml is not None:
            write_file(self.path / CONFIG, self.config_yaml, has_key(self.config_yaml))
        self._record.write()
        if self._resumed is not None:
            from rlplug.recording.resumed_run import cut_back

            step, validation = self._module.rollout_step, self._module.config.validation
            writes_samples, token_log = bool(self.samples_per_step), self._module.token_log
            for line in cut_back(
                self.path, self._metrics, step, validation, writes_samples, token_log, self._restored_rows
            ):
                say(line)
            self._experiment_log.resumed(step or -1)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        if module.strategy.gather([self.changes is not None and self.changes.has_optimizer_options])[0]:
            from rlplug.recording.resumed_run import take_optimizer_options

            steps = [module.policy_version, module.rollout_step][: len(trainer.optimizers)]
            take_optimizer_options(module.config, module.models, trainer.optimizers, module.schedulers, steps)
        if not trainer.is_global_zero:
            return
        self._began = time.monotonic()
        if self.config_yaml is not None:
            self._experiment_log.configuration(self.config_yaml)
        self._record.add_plan(module)
        if self._is_accepted:
            self._record.write()
        for line in [] if self.changes is None else self.changes.lines:
            say(line)
        if self.verbose and self.cache_note is not None:
            say(self.cache_note, wraps=True)
        print_start(module, self._record.values["prompts"], self.path, self.verbose)

    # ---- each step ------------------------------------------------------------------------------------------------

    def engine_started(self, targets: ScrapeTargets | None) -> None:
        self._accept()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[CONFIG_KEY] = self.config_yaml
        checkpoint[PROVENANCE] = self._provenance
        self._sync_rows()  # a run that goes on from the checkpoint cannot write them again
        files = [self.path / METRICS, *(file.path for file in self._rows.values())]
        checkpoint[ROWS] = self._kept_rows.of(files if trainer.is_global_zero else [])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._restored_rows = {self.path / name: rows for name, rows in checkpoint.get(ROWS, {}).items()}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module: Any = pl_module
        line = module.source.groups_line(module.rollout_step, module.timer.pop_spans())
        if trainer.is_global_zero and line is not None:
            self._rows[GROUPS].append(line)

    def rewards_failed(self, step: int, samples: Sequence[Sample]) -> None:
        failed = first_of_ranks(samples, MOST_ERRORS, self._module.strategy)
        if self._trainer.is_global_zero:
            records = [sample_record(sample, step, "reward_errors") for sample in failed]
            write_records(self._rows[REWARD_ERRORS], records)

    def step_ended(self, record: StepRecord) -> None:
        chosen = self._samples.write("train", record.step, record.samples, record.batch, self._module)
        if self._trainer.is_global_zero:
            self._experiment_log.step_ended(record, chosen)
        if self._module.start_timer.is_running:
            self._end_start(record.metrics)

    def validated(self, validation: Validation) -> None:
        chosen = self._samples.write("validate", validation.step, validation.samples, None, self._module)
        if self._trainer.is_global_zero:
            print_samples(chosen, validation.step)
            self._experiment_log.validated(validation.step, chosen)

    def _end_start(self, metrics: Mapping[str, float]) -> None:
        """Record how long the start took, up to the end of the first step, and say it."""
        timer = self._module.start_timer
        timer.end()
        if self._trainer.is_global_zero:
            compilation = Compilation.so_far()
            self._record.values["start"] = {
                "seconds": {name: round(each, 2) for name, each in timer.seconds.items()},
                "compilation": {name: round(each, 2) for name, each in asdict(compilation).items()},
            }
            self._record.write()
            say(start_line(timer.seconds, metrics, compilation), wraps=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            print_validation(trainer.callback_metrics, self.path)
            self._finish("finished")

    def _sync_rows(self) -> None:
        self._metrics.sync()
        for file in self._rows.values():
            file.sync()
        if self._module.token_log is not None:
            self._module.token_log.sync()

    # ---- the end --------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        if module.stop_signal.number is not None:
            if trainer.is_global_zero:
                self._finish("interrupted", f"stopped by {module.stop_signal.name} after step {module.rollout_step}")
                print_interrupted(module, self.path)
            return
        if self.export_policy:
            from rlplug.models.export import export_run

            for exported in export_run(module, self.path):
                module.observers.policy_exported(exported)
        if trainer.is_global_zero:
            step, last = module.rollout_step, module.plan.total_steps
            early = f"ended after step {step} of {last}, by trainer.max_time or a callback" if step < last else None
            self._finish("finished", early)
            seconds = time.monotonic() - self._began
            written = [self.path / name for name in EXPORTED if self.export_policy and (self.path / name).exists()]
            lines = [*filter(None, [early]), *(f"{path.name}: {path}" for path in written), *module.observers.ended()]
            if self.report and (missing := missing_distribution("commands", "report")) is not None:
                lines.append(f"no report: pip install {missing}, then rlplug report {self.path}")
            rows = read_metrics(self.path / METRICS)
            print_summary(self.path, rows, seconds, lines, can_resume=self.config_yaml is not None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._is_accepted:
            with suppress(RunError):  # the disk may be full, which the exception says
                self._finish("failed", f"{type(exception).__name__}: {exception}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._lock is not None:
            self._lock.close()

    def _finish(self, status: str, message: str | None = None) -> None:
        self._sync_rows()
        self._record.finish(status, message)
