"""Checks on optimizations with a mistake each; ``test_optimization_sabotage.py`` has what finds each."""

from __future__ import annotations

import broken_optimizations
import unusual_optimizations
from broken_optimizations import OptimizationTests
from test_optimization_sabotage import CAUGHT_BY, MISSED, UNUSUAL

for name in ("Fine", *CAUGHT_BY, *MISSED, *UNUSUAL):
    settings = {"optimization": getattr(unusual_optimizations if name in UNUSUAL else broken_optimizations, name)}
    if name == "ReportsItsRank":
        settings["meshes"] = ("2 ranks",)
    globals()[f"Test{name}"] = type(f"Test{name}", (OptimizationTests,), settings)
