"""The entry point: every hook, each with an effect that a run folder shows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from rlplug.interfaces import Denominators, LossOutput, RunObserver, SyncReport
from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry
from rlplug.rollout.source import RolloutSource
from rlplug.types import Batch, Rollout, StepBatch
from rlplug_probe.algorithm import MeanBaseline
from rlplug_probe.environment import Echo
from rlplug_probe.launcher import ProbeLauncher
from rlplug_probe.observer import Witness
from rlplug_probe.optimizations import FreezeEmbeddings, NoEffect
from rlplug_probe.reward import ShortReward
from rlplug_probe.rollout import SleepyRollout
from rlplug_probe.trainer import ProbeTrainer

RLPLUG_API_VERSION = ">=3.1,<4"
RLPLUG_AFTER = ("algos",)

ADVANTAGE_SCALE = 0.5
SYNC_COPIES = 2
"""Copies of the weights that a sync is said to move, so that a changed report is told from the core's."""
TOKENIZER_MARKER = "made_by_probe"
"""A model folder with a file of this name gets its tokenizer from here."""

seen: Counter[str] = Counter()


# ---- registration -------------------------------------------------------------------------------------------------


@hookimpl
def rlplug_register_rollouts(registry: Registry) -> None:
    registry.add("rollouts", SleepyRollout)


@hookimpl
def rlplug_register_algorithms(registry: Registry) -> None:
    registry.add("algorithms", MeanBaseline)


@hookimpl
def rlplug_register_rewards(registry: Registry) -> None:
    registry.add("rewards", ShortReward)


@hookimpl
def rlplug_register_environments(registry: Registry) -> None:
    registry.add("environments", Echo)


@hookimpl
def rlplug_register_trainers(registry: Registry) -> None:
    registry.add("trainers", ProbeTrainer)


@hookimpl
def rlplug_register_launchers(registry: Registry) -> None:
    registry.add("launchers", ProbeLauncher)


@hookimpl
def rlplug_register_optimizations(registry: Registry) -> None:
    registry.add("optimizations", FreezeEmbeddings)
    registry.add("optimizations", NoEffect)


@hookimpl
def rlplug_register_classes(registry: Registry) -> None:
    registry.add("classes", "rlplug_probe.source:Sevens")


# ---- observation --------------------------------------------------------------------------------------------------


@hookimpl
def rlplug_make_observer() -> RunObserver:
    return Witness()


@hookimpl
def rlplug_after_rollout(rollout: Rollout, step: int) -> Mapping[str, float]:
    return {"probe/rollout_samples": len(rollout.samples), "probe/rollout_step": step}


@hookimpl
def rlplug_after_update(metrics: Mapping[str, float], step: int) -> Mapping[str, float]:
    counts = {f"probe/{name}": count for name, count in seen.items()}
    return {"probe/seen_loss": metrics["loss"], "probe/update_step": step, **counts}


# ---- wrapper ------------------------------------------------------------------------------------------------------


@hookimpl(wrapper=True)
def rlplug_sync_weights() -> Generator[None, SyncReport, SyncReport]:
    report = yield
    seen["synced_bytes"] += report.num_bytes
    seen["syncs"] += 1
    return dataclasses.replace(report, num_bytes=SYNC_COPIES * report.num_bytes)


@hookimpl(wrapper=True)
def rlplug_prepare_batch(step: int) -> Generator[None, StepBatch, StepBatch]:
    batch = yield
    seen["batch_step"] = step
    assert batch.advantages is not None
    return batch.replace(advantages=ADVANTAGE_SCALE * batch.advantages)


@hookimpl(wrapper=True)
def rlplug_compute_loss(micro_batch: Batch, denominators: Denominators) -> Generator[None, LossOutput, LossOutput]:
    output = yield
    assert micro_batch.advantages is not None
    magnitude = micro_batch.advantages.abs().sum() / denominators.num_tokens
    return dataclasses.replace(output, metrics={**output.metrics, "probe/advantage_in_loss": magnitude})


# ---- resolver -----------------------------------------------------------------------------------------------------


class CountingSource(RolloutSource):
    """The core's source, which counts the steps that begin."""

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        seen["source_steps"] += 1


@hookimpl
def rlplug_make_source() -> RolloutSource:
    return CountingSource()


@hookimpl
def rlplug_explain_key() -> None:
    """Pass, so that the nearest key is named."""


@hookimpl
def rlplug_make_row_layout() -> None:
    """Pass, so that the next plugin's is made."""


@hookimpl
def rlplug_plan_memory() -> None:
    """Pass: no run of the tests is on a GPU."""


@hookimpl
def rlplug_make_token_log() -> None:
    """Pass, so that the next plugin's is made."""


@hookimpl
def rlplug_make_experiment_log() -> None:
    """Pass likewise."""


@hookimpl
def rlplug_make_profiler() -> None:
    """Pass likewise."""


@hookimpl
def rlplug_make_tokenizer(path: str) -> Any:
    if not (Path(path) / TOKENIZER_MARKER).exists():
        return None
    from transformers import AutoTokenizer

    seen["tokenizers"] += 1
    return AutoTokenizer.from_pretrained(path)
