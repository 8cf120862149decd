"""Run folder, with configuration, versions, metrics, samples, trained policy and report."""

from __future__ import annotations

import importlib.util
import json
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console

from rlplug.cli.run_output import print_interrupted, print_samples, print_start, print_summary, print_validation
from rlplug.distributed.checkpoint import run_dir_of
from rlplug.models.export import export_policy
from rlplug.observability.metrics_csv import MetricsCSV
from rlplug.plugin_manager import describe, plugins
from rlplug.training.memory_plan.table import memory_notes, memory_rows
from rlplug.types import RewardError, Sample

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


METRICS: Final = "metrics.csv"
SAMPLES: Final = "samples.jsonl"
REWARD_ERRORS: Final = "reward_errors.jsonl"


class RunFolder(Callback):
    """Writer of the run's folder, ``<dir>/001``, ``<dir>/002``, ...; a resumed run continues its own.

    Args:
        dir: Parent folder of the run's numbered folder.
        samples_per_step: Completions written to ``samples.jsonl`` per step: the best, the worst and some in between.
        export_policy: Write the trained policy as a Hugging Face folder, ``policy/``, when the run ends.
        report: Write ``report.html`` when the run ends; needs the extra ``rlplug[report]``.
    """

    def __init__(
        self, dir: str = "runs/default", samples_per_step: int = 4, export_policy: bool = True, report: bool = True
    ) -> None:
        self.dir = dir
        self.samples_per_step = samples_per_step
        self.export_policy = export_policy
        self.report = report
        self.config_yaml: str | None = None
        """Resolved configuration as YAML; the command line sets it."""
        self.resumed_from: str | None = None
        """Path of the checkpoint from which the run resumes; the command line sets it."""
        self.path = Path()
        """The run's own folder, once it is chosen in ``setup``."""
        self._began = 0.0
        self._console = Console()
        self._record: dict[str, Any] = {}

    # ---- the beginning --------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        module: Any = pl_module
        folder = self._choose_folder(trainer) if trainer.is_global_zero else Path()
        self.path = trainer.strategy.broadcast(folder)
        module.run_dir = self.path
        trainer.loggers = [MetricsCSV(self.path / METRICS), *trainer.loggers]
        if importlib.util.find_spec("tensorboard"):
            trainer.loggers = [*trainer.loggers, TensorBoardLogger(self.path, name="", version="tensorboard")]
        if trainer.is_global_zero:
            if self.config_yaml is not None:
                (self.path / "config.yaml").write_text(self.config_yaml)
            self._record = {
                "status": "running",
                "command": stage,
                "started": _now(),
                "finished": None,
                "versions": {"python": platform.python_version(), **{d.name: d.version for d in distributions()}},
                "plugins": describe(plugins().records),
                "device": str(trainer.strategy.root_device),
                "world_size": trainer.world_size,
                "batch_plan": [],
                "memory_plan": [],
                "memory_notes": [],
                "effects": [],
                "message": None,
            }
            self._save_record()

    def _choose_folder(self, trainer: Trainer) -> Path:
        """Return the run's own folder when it is resumed, else a new one with the next number."""
        if trainer.state.fn == "fit" and self.resumed_from and (folder := run_dir_of(self.resumed_from)):
            return folder
        base = Path(self.dir)
        base.mkdir(parents=True, exist_ok=True)
        number = max((int(path.name) for path in base.iterdir() if path.name.isdigit()), default=0) + 1
        folder = base / f"{number:03d}"
        folder.mkdir()
        return folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        if not trainer.is_global_zero:
            return
        self._began = time.monotonic()
        MetricsCSV(self.path / METRICS).drop_after(module.rollout_step)
        self._drop_samples_after(module.rollout_step)
        self._record["batch_plan"] = module.plan.batch.table_rows(module.config.on_policy_pass)
        memory = module.plan.memory
        if memory is not None:
            self._record["memory_plan"] = memory_rows(memory.plan)
            self._record["memory_notes"] = memory_notes(memory)
        self._record["effects"] = [effect.description for effect in module.models.effects]
        self._save_record()
        print_start(self._console, module, trainer.datamodule.num_filtered, self.path)  # type: ignore[attr-defined]

    # ---- each step ------------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._log_samples(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_samples(trainer, pl_module)
        if trainer.is_global_zero:
            print_validation(self._console, trainer.callback_metrics, self.path)
            self._finish("finished")

    def _log_samples(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write some of the module's new samples, and all of those whose reward failed."""
        module: Any = pl_module
        taken, module.newest_samples = module.newest_samples, []
        if not trainer.is_global_zero:
            return
        for phase, step, samples in taken:
            if phase == "reward_errors":
                self._append_samples(REWARD_ERRORS, samples, step, phase)
                continue
            chosen = _spread(samples, self.samples_per_step)
            self._append_samples(SAMPLES, chosen, step, phase)
            if phase == "validate":
                print_samples(self._console, chosen, step)
                for logger in trainer.loggers:
                    if isinstance(logger, TensorBoardLogger):
                        text = "\n\n".join(f"{s.prompt.text} **{s.completion}** ({s.reward:g})" for s in chosen)
                        logger.experiment.add_text("validate/samples", text, step)

    def _append_samples(self, name: str, samples: Sequence[Sample], step: int, phase: str) -> None:
        with (self.path / name).open("a") as file:
            for sample in samples:
                file.write(json.dumps(_sample_record(sample, step, phase), default=str) + "\n")

    def _drop_samples_after(self, step: int) -> None:
        """Remove the samples after ``step``: a run that resumes from there writes them again."""
        for name in (SAMPLES, REWARD_ERRORS):
            path = self.path / name
            if path.is_file():
                lines = path.read_text().splitlines(keepends=True)
                path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))

    # ---- the end --------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        if module.stop_signal.is_set:
            if trainer.is_global_zero:
                self._finish("interrupted", f"stopped by Ctrl-C after step {module.rollout_step}")
                print_interrupted(self._console, module, self.path)
            return
        if self.export_policy:
            inputs = module.inputs
            folder = self.path / "policy"
            rank, by = trainer.global_rank, module.config.model_trainer
            export_policy(module.policy, inputs.tokenizer, inputs.spec.dtype, folder, rank, trainer=by)
        if trainer.is_global_zero:
            self._finish("finished")
            seconds = time.monotonic() - self._began
            print_summary(self._console, self.path, MetricsCSV(self.path / METRICS), seconds, self._results())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._record:
            self._log_samples(trainer, pl_module)
            self._finish("failed", f"{type(exception).__name__}: {exception}")

    def _finish(self, status: str, message: str | None = None) -> None:
        self._record |= {"status": status, "message": message, "finished": _now()}
        self._save_record()

    def _save_record(self) -> None:
        (self.path / "run.json").write_text(json.dumps(self._record, indent=2))

    def _results(self) -> list[str]:
        """Write the report, and say where results are."""
        lines = [f"policy: {self.path / 'policy'}"] if self.export_policy else []
        if self.report and importlib.util.find_spec("plotly"):
            from rlplug.observability.report import write_report

            lines.append(f"report: {write_report(self.path)}")
        elif self.report:
            lines.append(f"no report: pip install 'rlplug[report]', then rlplug report {self.path}")
        return lines


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return ``count`` samples spread evenly from worst to best, failed rewards first."""
    ordered = sorted(samples, key=lambda sample: (not sample.errors, sample.reward))
    if len(ordered) <= count:
        return ordered
    return [ordered[round(index * (len(ordered) - 1) / max(count - 1, 1))] for index in range(count)]


def _sample_record(sample: Sample, step: int, phase: str) -> dict[str, Any]:
    rewards = {
        name: {"error": value.message} if isinstance(value, RewardError) else value
        for name, value in sample.rewards.items()
    }
    return {
        "step": step,
        "phase": phase,
        "prompt_uid": sample.prompt.uid,
        "prompt": sample.prompt.text,
        "completion": sample.completion,
        "answer": sample.prompt.answer,
        "reward": None if sample.errors else sample.reward,
        "rewards": rewards,
        "finish_reason": sample.finish_reason,
        "num_tokens": sample.num_response_tokens,
    }
