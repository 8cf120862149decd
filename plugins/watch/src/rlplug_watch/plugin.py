"""The entry point: what this distribution registers. The classes are imported when a run names them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
    from transformers import PreTrainedTokenizerBase

    from rlplug.config import RunConfig
    from rlplug.distributed.strategy import RLFSDP2Strategy
    from rlplug.interfaces import ExperimentLog, RunObserver
    from rlplug.interfaces.token_log import TokenLog, TokenLogOptions
    from rlplug.types import Rollout

RLPLUG_API_VERSION = ">=3.1,<4"


@hookimpl
def rlplug_register_classes(registry: Registry) -> None:
    for place in (
        "rlplug_watch.lightning_callbacks:LightningCallbacks",
        "rlplug_watch.loggers.phase_spans:PhaseSpans",
        "rlplug_watch.loggers.prometheus:PrometheusLogger",
    ):
        registry.add("classes", place)


@hookimpl
def rlplug_make_observer() -> RunObserver:
    from rlplug_watch.report_writer import ReportWriter

    return ReportWriter()


@hookimpl
def rlplug_after_rollout(rollout: Rollout) -> dict[str, float]:
    from rlplug_watch.reward_statistics import reward_statistics

    return reward_statistics(rollout.drawn)


@hookimpl
def rlplug_make_token_log(
    folder: Path,
    options: TokenLogOptions,
    config: RunConfig,
    strategy: RLFSDP2Strategy,
    tokenizer: PreTrainedTokenizerBase,
) -> TokenLog:
    from rlplug_watch.token_log.log import FileTokenLog

    return FileTokenLog(folder, options, config, strategy, tokenizer)


@hookimpl
def rlplug_make_experiment_log(folder: Path, trainer: Trainer) -> ExperimentLog:
    from rlplug_watch.loggers.experiment_log import LoggedExperiment

    return LoggedExperiment(folder, trainer)


@hookimpl
def rlplug_make_profiler(steps: str, tool: str, ranks: str) -> Callback:
    from rlplug_watch.profile.profiler import StepTracer

    return StepTracer(steps, tool, ranks)
