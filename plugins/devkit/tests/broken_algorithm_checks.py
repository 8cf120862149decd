"""Checks on algorithms with a mistake each; ``test_algorithm_sabotage.py`` has what finds each."""

from __future__ import annotations

import broken_algorithms
from broken_algorithms import AlgorithmTests
from test_algorithm_sabotage import CAUGHT_BY, MISSED

for name in ("Fine", *CAUGHT_BY, *MISSED):
    settings = {"algorithm": getattr(broken_algorithms, name)}
    globals()[f"Test{name}"] = type(f"Test{name}", (AlgorithmTests,), settings)
