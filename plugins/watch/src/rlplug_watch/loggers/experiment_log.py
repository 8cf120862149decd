"""What experiment loggers get besides metrics: the resolved configuration, samples and histograms; TensorBoard."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import yaml
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from rlplug.distributed.durable_files import reason
from rlplug.interfaces import ExperimentLog, StepRecord
from rlplug.observability.terminal import visible
from rlplug.types import RewardError, Sample, StepBatch
from rlplug_watch.secrets import mask_secrets

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

COLUMNS: Final = ("step", "reward", "prompt", "completion", "answer", "finish_reason", "tokens", "rewards")
NUM_TABLES: Final = 20
"""Tables of training samples, and histograms of each kind, in a run; every validation has a table too."""
FORMER_REPORT: Final = "report-before-resume.html"
"""Name that a resumed run gives to the report of its former end."""
MAX_TEXT: Final = 20_000
"""Longest text that is logged, in characters."""
NUM_BINS: Final = 64
"""Bins of a histogram."""


class LoggedExperiment(ExperimentLog):
    """Configuration, samples and histograms for all loggers of a run, and TensorBoard's where it is installed."""

    loggers: Sequence[RunTensorBoard] = ()

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self._folder, self._trainer = folder, trainer
        self._continued = [name for logger in trainer.loggers if (name := _run_that_exists(logger))]
        if importlib.util.find_spec("tensorboard"):
            self.loggers = (RunTensorBoard(folder, name="", version="tensorboard"),)

    def configuration(self, config_yaml: str) -> None:
        log_configuration(self._trainer.loggers, config_yaml)

    def resumed(self, step: int) -> None:
        from rlplug_watch.report.page import REPORT_FILE

        for logger in self.loggers:
            logger.drop_after(step)
        if (report := self._folder / REPORT_FILE).exists():
            report.replace(report.with_name(FORMER_REPORT))
        for name in self._continued:
            rank_zero_warn(
                f"{name} keeps what the run logged after step {step}, and gets those steps again: for curves without "
                "them, give a resumed run no id. metrics.jsonl and TensorBoard have each step once."
            )

    def step_ended(self, record: StepRecord, chosen: Sequence[Sample]) -> None:
        module: Any = self._trainer.lightning_module
        if is_due(record.step, module.plan.total_steps):
            log_samples(self._trainer.loggers, chosen, record.step, "train")
            values = {**record.values, "advantage": _advantages(record.batch)}
            log_histograms(self._trainer.loggers, values, record.step)

    def validated(self, step: int, chosen: Sequence[Sample]) -> None:
        log_samples(self._trainer.loggers, chosen, step, "validate")


class RunTensorBoard(TensorBoardLogger):
    """Logger that stops with a warning when its file cannot be written: ``metrics.jsonl`` has the same numbers."""

    _has_failed = False

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.attempt(super().log_metrics, metrics, step)

    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        self.attempt(functools.partial(super().log_hyperparams, *arguments, **options))

    def drop_after(self, step: int) -> None:
        """Have TensorBoard leave out what former processes of the run logged after a step."""
        events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        # the mark that SummaryWriter(purge_step=...) writes, for a writer that is open already
        log = events.SessionLog(status=events.SessionLog.START)
        mark = events.Event(step=step + 1, session_log=log)
        self.attempt(lambda: self.experiment._get_file_writer().add_event(mark, step + 1))

    def save(self) -> None:
        self.attempt(super().save)

    def finalize(self, status: str) -> None:
        self.attempt(super().finalize, status)

    def attempt(self, write: Callable[..., Any], *arguments: Any) -> None:
        """Write, or warn once that it failed and write no more."""
        if self._has_failed:
            return
        try:
            write(*arguments)
        except (OSError, ValueError, RuntimeError) as error:
            self._has_failed = True
            rank_zero_warn(f"{self.log_dir} gets no more metrics, because it cannot be written: {reason(error)}.")


def _run_that_exists(logger: Logger) -> str | None:
    """Return the name of a run of W&B or MLflow that a logger adds to, before its first use; none where it makes one.

    Neither can drop what such a run has.
    """
    if isinstance(logger, WandbLogger) and logger._id is not None:
        return f"W&B's run {logger._id}"
    return f"MLflow's run {logger._run_id}" if isinstance(logger, MLFlowLogger) and logger._run_id else None


def log_configuration(loggers: Iterable[Logger], config_yaml: str) -> None:
    """Give each logger the resolved configuration, with its secrets masked, as hyper-parameters.

    MLflow cuts each of its parameters at some length, so it gets the whole as the artifact ``config.yaml`` too.
    """
    config = mask_secrets(yaml.safe_load(config_yaml))
    for logger in loggers:
        logger.log_hyperparams(config)
        if isinstance(logger, MLFlowLogger):
            logger.experiment.log_text(logger.run_id, yaml.safe_dump(config, sort_keys=False), "config.yaml")


def is_due(step: int, total_steps: int) -> bool:
    """Return whether a step's samples are logged: those of every twentieth of a run, and of its first step."""
    return step == 1 or step % max(1, total_steps // NUM_TABLES) == 0


def log_samples(loggers: Iterable[Logger], samples: Sequence[Sample], step: int, phase: str) -> None:
    """Log samples as a table to W&B and MLflow, and as text to TensorBoard, under ``<phase>/samples``.

    What a model wrote is shown as it is: neither Markdown nor a control character in it is obeyed.
    """
    rows = [_row(sample, step) for sample in samples]
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table(f"{phase}/samples", columns=list(COLUMNS), data=rows, step=step)
        elif isinstance(logger, MLFlowLogger):
            # the form of mlflow.log_table, which needs pandas and would download and upload all former rows
            table = {"columns": list(COLUMNS), "data": rows}
            logger.experiment.log_dict(logger.run_id, table, f"{phase}/samples/step-{step:08d}.json")
        elif isinstance(logger, TensorBoardLogger):
            cells = "\n\n".join(
                "\n".join(f"{name}: {cell}" for name, cell in zip(COLUMNS, row, strict=True)) for row in rows
            )
            text = textwrap.indent(cells, "    ", lambda line: True)
            _write(logger, logger.experiment.add_text, f"{phase}/samples", text, step)


def log_histograms(loggers: Iterable[Logger], values: Mapping[str, NDArray[Any]], step: int) -> None:
    """Log the distribution of a step's values, ``histogram/<name>``, to W&B, MLflow and TensorBoard.

    MLflow has no histograms: it gets counts and edges of bins as JSON.

    Args:
        loggers: All loggers of the run.
        values: Numbers of any shape by name; those that are not finite are left out.
        step: Number of the step.
    """
    finite = {name: found[np.isfinite(found)].astype(np.float64) for name, found in values.items()}
    for name, found in finite.items():
        if len(found) == 0:
            continue
        counts, edges = np.histogram(found, bins=NUM_BINS, range=_range_of(found))
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                import wandb

                histogram: Any = wandb.Histogram(np_histogram=(counts, edges))
                logger.log_metrics({f"histogram/{name}": histogram}, step=step)
            elif isinstance(logger, MLFlowLogger):
                bins = {"counts": counts.tolist(), "edges": edges.tolist()}
                logger.experiment.log_dict(logger.run_id, bins, f"histogram/{name}/step-{step:08d}.json")
            elif isinstance(logger, TensorBoardLogger):
                _write(logger, logger.experiment.add_histogram, f"histogram/{name}", found, step, edges)


def _write(logger: TensorBoardLogger, write: Callable[..., Any], *arguments: Any) -> None:
    if isinstance(logger, RunTensorBoard):
        logger.attempt(write, *arguments)
    else:
        write(*arguments)


def _range_of(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return a range that has room for all bins, also where values are equal, or differ by rounding alone."""
    low, high = float(values.min()), float(values.max())
    least = NUM_BINS * float(np.spacing(max(abs(low), abs(high))))
    margin = max(0.5, least) if high - low < least else 0.0
    return low - margin, high + margin


def _row(sample: Sample, step: int) -> list[Any]:
    rewards = ", ".join(
        f"{name} {'failed' if isinstance(value, RewardError) else format(value, 'g')}"
        for name, value in sample.rewards.items()
    )
    texts = (sample.prompt.text, sample.transcript, str(sample.prompt.answer))
    prompt, completion, answer = (visible(text[:MAX_TEXT]) for text in texts)
    reward = None if sample.errors else sample.reward
    return [step, reward, prompt, completion, answer, sample.finish_reason, sample.num_response_tokens, rewards]


def _advantages(batch: StepBatch) -> NDArray[np.float32]:
    """Return the advantages of this rank's rows, float32 [B], or [trainable tokens] where those of a row differ."""
    if "advantages" in batch.per_sequence:
        return batch.per_sequence["advantages"][batch.per_sequence["reward_valid"]]
    return batch.per_token["advantages"][batch.per_token["response_mask"]]
