"""Conformance kits for the tests of plugin authors, and a tiny run to try a plugin in; ``rlplug[testing]``."""

from rlplug.testing.algorithms.conformance import AlgorithmConformance
from rlplug.testing.engines.conformance import EngineConformance
from rlplug.testing.hooks.conformance import HooksConformance
from rlplug.testing.optimizations.conformance import OptimizationConformance
from rlplug.testing.reference import BFLOAT16, FLOAT32, FP8, Tolerances
from rlplug.testing.tasks.data_sources import DataSourceConformance
from rlplug.testing.tasks.environments import EnvironmentConformance, make_prompt
from rlplug.testing.tasks.rewards import RewardConformance, make_sample
from rlplug.testing.tasks.tiny_run import TinyRun, train_two_steps
from rlplug.testing.trainers.cases import TINY_MODELS, meshes_of
from rlplug.testing.trainers.conformance import TrainerConformance

__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "FP8",
    "TINY_MODELS",
    "AlgorithmConformance",
    "DataSourceConformance",
    "EngineConformance",
    "EnvironmentConformance",
    "HooksConformance",
    "OptimizationConformance",
    "RewardConformance",
    "TinyRun",
    "Tolerances",
    "TrainerConformance",
    "make_prompt",
    "make_sample",
    "meshes_of",
    "train_two_steps",
]
