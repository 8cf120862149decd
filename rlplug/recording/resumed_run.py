"""What a resumed run does otherwise than the run that wrote its checkpoint, and which rows it writes again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlplug.distributed.checkpoints.resumed_files import cut_back_lines, set_aside_after, set_exports_aside
from rlplug.distributed.durable_files import whole_lines
from rlplug.interfaces.token_log import TokenLog
from rlplug.observability.metrics_log import MetricsLog
from rlplug.observability.sample_records import is_trained
from rlplug.recording.run_record import METRICS, REWARD_ERRORS, SAMPLES
from rlplug.rollout.config import GROUPS
from rlplug.setup.build import make_optimizers
from rlplug.training.validation.config import ValidationConfig

if TYPE_CHECKING:
    from rlplug.config import RunConfig
    from rlplug.models.build import Models

_OF_OPTIMIZERS: Final = (
    "model.optimizer.",
    "model.lr_scheduler",
    "model.critic.optimizer.",
    "model.critic.lr_scheduler",
)
_MOST_LINES: Final = 20


@dataclass(frozen=True)
class Changes:
    """Keys whose values differ between the configuration of a checkpoint and that of the run that resumes from it."""

    values: Mapping[str, tuple[Any, Any]]
    """Former and new value by key; ``None`` where a key is not set."""

    @property
    def has_optimizer_options(self) -> bool:
        """Whether the optimizers or their schedules have other options."""
        return any(key.startswith(_OF_OPTIMIZERS) for key in self.values)

    @property
    def lines(self) -> list[str]:
        """Lines that say what differs; none where nothing does."""
        shown = [f"  {key}: {_short(old)} -> {_short(new)}" for key, (old, new) in self.values.items()]
        if len(shown) > _MOST_LINES:
            shown = [*shown[:_MOST_LINES], f"  and {len(shown) - _MOST_LINES} more"]
        return ["changed since the checkpoint:", *shown] if shown else []


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def cut_back(
    folder: Path,
    metrics: MetricsLog,
    step: int,
    validation: ValidationConfig,
    writes_samples: bool,
    token_log: TokenLog | None,
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
    """
    begins = validation.beside_training and validation.is_due(step)

    def is_repeated(record: dict[str, Any]) -> bool:
        return begins and record["step"] == step and record.get("phase") == "validate"

    steps = [record["step"] for record in whole_lines(folder / METRICS)]
    num_rows, newest = sum(each > step for each in steps), max(steps, default=step)
    removed = f", {num_rows} row{'s' * (num_rows > 1)} after it removed" if num_rows else ""
    said = [f"resumed from step {step}{removed}"]
    said += set_exports_aside(folder, newest)
    aside = set_aside_after(folder, step, [METRICS, SAMPLES, REWARD_ERRORS, GROUPS])
    if aside is not None:
        said.append(f"the checkpoints after step {step} are now in {aside}, with copies of their rows")
    last = step or -1  # the validation before the first step is repeated
    said += metrics.cut_back(last, repeats_scores=begins)
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
