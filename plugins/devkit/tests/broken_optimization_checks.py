"""Checks on optimizations with a mistake each; ``test_optimization_sabotage.py`` has what finds each."""

from __future__ import annotations

import broken_optimizations
import broken_passes
import unusual_optimizations
from broken_optimizations import OptimizationTests
from test_optimization_sabotage import CAUGHT_BY, MISSED, UNUSUAL

for name in ("Fine", *CAUGHT_BY, *MISSED, *UNUSUAL):
    modules = (unusual_optimizations,) if name in UNUSUAL else (broken_optimizations, broken_passes)
    settings = {"optimization": next(vars(module)[name] for module in modules if name in vars(module))}
    if name in ("ReportsItsRank", "ScalesOnOtherRanks"):
        settings["meshes"] = ("2 ranks",)
    globals()[f"Test{name}"] = type(f"Test{name}", (OptimizationTests,), settings)
