"""Conformance kits for the tests of plugin authors, and a tiny run to try a plugin in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug_devkit.algorithms.conformance import AlgorithmConformance
    from rlplug_devkit.algorithms.examples import Completion, WorkedExample
    from rlplug_devkit.engines.conformance import EngineConformance
    from rlplug_devkit.hooks.conformance import HooksConformance
    from rlplug_devkit.optimizations.conformance import OptimizationConformance
    from rlplug_devkit.reference import BFLOAT16, FLOAT32, FP8, Tolerances
    from rlplug_devkit.tasks.data_sources import DataSourceConformance
    from rlplug_devkit.tasks.environments import EnvironmentConformance, make_prompt
    from rlplug_devkit.tasks.rewards import RewardConformance, make_sample
    from rlplug_devkit.tasks.tiny_run import TinyRun, train_two_steps
    from rlplug_devkit.trainers.cases import TINY_MODELS, meshes_of
    from rlplug_devkit.trainers.conformance import TrainerConformance

__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "FP8",
    "TINY_MODELS",
    "AlgorithmConformance",
    "Completion",
    "DataSourceConformance",
    "EngineConformance",
    "EnvironmentConformance",
    "HooksConformance",
    "OptimizationConformance",
    "RewardConformance",
    "TinyRun",
    "Tolerances",
    "TrainerConformance",
    "WorkedExample",
    "make_prompt",
    "make_sample",
    "meshes_of",
    "train_two_steps",
]

__getattr__ = late_names(
    __name__,
    {
        "AlgorithmConformance": "algorithms.conformance",
        "BFLOAT16": "reference",
        "Completion": "algorithms.examples",
        "DataSourceConformance": "tasks.data_sources",
        "EngineConformance": "engines.conformance",
        "EnvironmentConformance": "tasks.environments",
        "FLOAT32": "reference",
        "FP8": "reference",
        "HooksConformance": "hooks.conformance",
        "OptimizationConformance": "optimizations.conformance",
        "RewardConformance": "tasks.rewards",
        "TINY_MODELS": "trainers.cases",
        "TinyRun": "tasks.tiny_run",
        "Tolerances": "reference",
        "TrainerConformance": "trainers.conformance",
        "WorkedExample": "algorithms.examples",
        "make_prompt": "tasks.environments",
        "make_sample": "tasks.rewards",
        "meshes_of": "trainers.cases",
        "train_two_steps": "tasks.tiny_run",
    },
)
