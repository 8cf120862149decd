"""What a resumed run does first: it removes the rows that it writes again, and takes optimizers' new options."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from rlplug.distributed.checkpoints.files import OTHERS
from rlplug.distributed.checkpoints.reader import READ_ERRORS
from rlplug.distributed.checkpoints.resumed_files import (
    cut_back_lines,
    cut_back_metrics,
    restore_lines,
    set_aside_after,
    set_exports_aside,
)
from rlplug.distributed.durable_files import whole_lines
from rlplug.interfaces.token_log import TokenLog
from rlplug.observability.metrics_log import MetricsLog
from rlplug.observability.sample_records import is_trained
from rlplug.recording.changes import Changes, changes_since
from rlplug.recording.provenance import PROVENANCE
from rlplug.recording.run_record import METRICS, REWARD_ERRORS, SAMPLES
from rlplug.rollout.config import GROUPS
from rlplug.setup.build import make_optimizers
from rlplug.training.validation.config import ValidationConfig

if TYPE_CHECKING:
    from rlplug.config import RunConfig
    from rlplug.models.build import Models


def compare(
    checkpoint: Path,
    configs: tuple[Mapping[str, Any], str | None],
    record: Mapping[str, Mapping[str, str]],
    config: RunConfig,
    allowed: Sequence[str],
) -> Changes:
    """Compare a checkpoint, whose files are not verified yet, with the run that resumes from it.

    Args:
        configs: Its configuration, and the run's as YAML; empty and ``None`` for a run from Python.
        record: What the run's numbers come from.
    """
    try:
        former = torch.load(checkpoint / OTHERS, weights_only=True).get(PROVENANCE)
    except READ_ERRORS:  # verifying says what is wrong with it
        former = None
    old, new = configs
    both = (old, yaml.safe_load(new)) if old and new else ({}, {})
    needs_weights = config.lora is not None or config.algorithm.needs.reference_policy
    of_engine = config.engine.deciding_options
    return changes_since(checkpoint, both, (former, record), allowed, needs_weights, of_engine)


def cut_back(
    folder: Path,
    metrics: MetricsLog,
    step: int,
    validation: ValidationConfig,
    writes_samples: bool,
    token_log: TokenLog | None,
    kept_rows: Mapping[Path, Any],
) -> list[str]:
    """Remove what the run wrote after ``step`` and will write again; return lines that say so, and what is lost.

    What was exported gets another name.

    Args:
        folder: The run's.
        metrics: Its ``metrics.jsonl``.
        step: Step of the checkpoint.
        validation: When there is a validation; one beside the training is repeated, where it is of ``step``.
        writes_samples: Whether the run writes samples of its steps.
        token_log: Its token log, if there is one.
        kept_rows: Rows that the checkpoint keeps, compressed, uint8, by their file.
    """
    begins = validation.beside_training and validation.is_due(step)

    def is_repeated(record: dict[str, Any]) -> bool:
        return begins and record["step"] == step and record.get("phase") == "validate"

    restored = [line for path, rows in kept_rows.items() for line in restore_lines(path, rows.numpy().tobytes())]
    steps = [record["step"] for record in whole_lines(folder / METRICS)]
    num_rows, newest = sum(each > step for each in steps), max(steps, default=step)
    removed = f", {num_rows} row{'s' * (num_rows > 1)} after it removed" if num_rows else ""
    said = [f"resumed from step {step}{removed}", *restored]
    said += set_exports_aside(folder, newest)
    aside = set_aside_after(folder, step, [METRICS, SAMPLES, REWARD_ERRORS, GROUPS])
    if aside is not None:
        said.append(f"the checkpoints after step {step} are now in {aside}, with copies of their rows")
    last = step or -1  # the validation before the first step is repeated
    said += cut_back_metrics(folder / METRICS, last, repeats_scores=begins)
    metrics.end_wait()
    said += cut_back_lines(folder / GROUPS, last)
    said += [] if token_log is None else token_log.cut_back(last, aside)
    said += cut_back_lines(folder / SAMPLES, last, is_trained if writes_samples else None, is_repeated)
    return said + cut_back_lines(folder / REWARD_ERRORS, last)


def take_optimizer_options(
    config: RunConfig, models: Models, optimizers: Sequence[Any], schedulers: Sequence[Any], num_steps: Sequence[int]
) -> None:
    """Give resumed optimizers and schedulers the options of a changed configuration; their state stays.

    Args:
        config: Options of the run.
        models: Policy and critic.
        optimizers: The policy's, then the critic's, as restored.
        schedulers: Theirs; ``None`` for a constant rate.
        num_steps: RL steps that each has taken, after which a new schedule gives the rate.
    """
    for optimizer, scheduler, new, new_scheduler, steps in zip(
        optimizers, schedulers, *make_optimizers(config, models), num_steps, strict=True
    ):
        if new_scheduler is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step")
                for _ in range(steps):
                    new_scheduler.step()
            scheduler.load_state_dict(new_scheduler.state_dict())
        for group, new_group in zip(optimizer.param_groups, new.param_groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(new_group | {"params": parameters})
