"""Conformance kit: checks of rollout engines for the CI of plugin authors. It needs pytest: ``rlplug[testing]``."""

from rlplug.testing.engine import EngineConformance
from rlplug.testing.reference import BFLOAT16, FLOAT32, FP8, Tolerances

__all__ = ["BFLOAT16", "FLOAT32", "FP8", "EngineConformance", "Tolerances"]
