"""Files that a run writes into its folder, row by row, and how a resumed run cuts them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rlplug.distributed.checkpoint_files import set_aside_after
from rlplug.distributed.durable_files import cut_back_lines
from rlplug.errors import ConfigError
from rlplug.interfaces.token_log import TokenLog
from rlplug.observability.metrics_log import MetricsLog
from rlplug.observability.sample_records import is_trained
from rlplug.rollout.config import GROUPS
from rlplug.training.validation.config import ValidationConfig

METRICS: Final = "metrics.jsonl"
SAMPLES: Final = "samples.jsonl"
REWARD_ERRORS: Final = "reward_errors.jsonl"


def require_no_file(folder: Path, key: str) -> None:
    """Refuse a folder whose place, or that of a parent, a file takes.

    Args:
        folder: The folder, which may not exist yet.
        key: Key or option that names it.

    Raises:
        ConfigError: The message names the file.
    """
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ConfigError(f"{key} is {str(folder)!r}, and {place} is a file: give a folder.")


def cut_back(
    folder: Path,
    metrics: MetricsLog,
    step: int,
    validation: ValidationConfig,
    writes_samples: bool,
    token_log: TokenLog | None,
) -> list[str]:
    """Remove what the run wrote after ``step`` and will write again; return lines that say what is lost.

    Args:
        folder: The run's.
        metrics: Its ``metrics.jsonl``.
        step: Step of the checkpoint.
        validation: When there is a validation; one beside the training is repeated, where it is of ``step``.
        writes_samples: Whether the run writes samples of its steps.
        token_log: Its token log, if there is one.
    """
    begins = validation.beside_training and validation.is_due(step)

    def is_repeated(record: dict[str, Any]) -> bool:
        return begins and record["step"] == step and record.get("phase") == "validate"

    said = []
    aside = set_aside_after(folder, step, [METRICS, SAMPLES, REWARD_ERRORS, GROUPS])
    if aside is not None:
        said.append(f"the checkpoints after step {step} are now in {aside}, with copies of their rows")
    last = step or -1  # the validation before the first step is repeated
    said += metrics.cut_back(last, repeats_scores=begins)
    said += cut_back_lines(folder / GROUPS, last)
    said += [] if token_log is None else token_log.cut_back(last, aside)
    said += cut_back_lines(folder / SAMPLES, last, is_trained if writes_samples else None, is_repeated)
    return said + cut_back_lines(folder / REWARD_ERRORS, last)
