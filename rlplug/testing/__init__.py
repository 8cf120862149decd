"""Conformance kits: checks of rollout engines and of trainers for the CI of plugin authors; ``rlplug[testing]``."""

from rlplug.testing.engine import EngineConformance
from rlplug.testing.reference import BFLOAT16, FLOAT32, FP8, Tolerances
from rlplug.testing.trainers.cases import TINY_MODELS, meshes_of
from rlplug.testing.trainers.conformance import TrainerConformance

__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "FP8",
    "TINY_MODELS",
    "EngineConformance",
    "Tolerances",
    "TrainerConformance",
    "meshes_of",
]
