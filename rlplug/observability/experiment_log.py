"""What experiment loggers get besides metrics: the resolved configuration, and samples."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Final

import yaml
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from rlplug.observability.tensorboard import RunTensorBoard
from rlplug.observability.terminal import visible
from rlplug.types import RewardError, Sample

COLUMNS: Final = ("step", "reward", "prompt", "completion", "answer", "finish_reason", "tokens", "rewards")
NUM_TABLES: Final = 20
"""Tables of training samples in a run; every validation has one too."""
MAX_TEXT: Final = 20_000
"""Longest text that is logged, in characters."""


def log_configuration(loggers: Iterable[Logger], config_yaml: str) -> None:
    """Give each logger the resolved configuration as hyper-parameters: the configuration of a run in W&B."""
    config = yaml.safe_load(config_yaml)
    for logger in loggers:
        logger.log_hyperparams(config)


def is_due(step: int, total_steps: int) -> bool:
    """Return whether training samples of ``step`` are logged: those of every twentieth of a run, and of its first."""
    return step == 1 or step % max(1, total_steps // NUM_TABLES) == 0


def log_samples(loggers: Iterable[Logger], samples: Sequence[Sample], step: int, phase: str) -> None:
    """Log samples as a table to W&B and as text to TensorBoard, under ``<phase>/samples``.

    What a model wrote is shown as it is: neither Markdown nor a control character in it is obeyed.
    """
    rows = [_row(sample, step) for sample in samples]
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_table(f"{phase}/samples", columns=list(COLUMNS), data=rows, step=step)
        elif isinstance(logger, TensorBoardLogger):
            cells = "\n\n".join(
                "\n".join(f"{name}: {cell}" for name, cell in zip(COLUMNS, row, strict=True)) for row in rows
            )
            add_text = logger.add_text if isinstance(logger, RunTensorBoard) else logger.experiment.add_text
            add_text(f"{phase}/samples", textwrap.indent(cells, "    ", lambda line: True), step)


def _row(sample: Sample, step: int) -> list[Any]:
    rewards = ", ".join(
        f"{name} {'failed' if isinstance(value, RewardError) else format(value, 'g')}"
        for name, value in sample.rewards.items()
    )
    texts = (sample.prompt.text, sample.completion, str(sample.prompt.answer))
    prompt, completion, answer = (visible(text[:MAX_TEXT]) for text in texts)
    reward = None if sample.errors else sample.reward
    return [step, reward, prompt, completion, answer, sample.finish_reason, sample.num_response_tokens, rewards]
