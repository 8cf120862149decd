"""Checks on optimizations with a mistake each; ``test_optimization_sabotage.py`` has what finds each."""

from __future__ import annotations

import broken_optimizations
from broken_optimizations import OptimizationTests
from test_optimization_sabotage import CAUGHT_BY, MISSED

for name in ("Fine", *CAUGHT_BY, *MISSED):
    settings = {"optimization": getattr(broken_optimizations, name)}
    globals()[f"Test{name}"] = type(f"Test{name}", (OptimizationTests,), settings)
