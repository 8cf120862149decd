"""Checks on algorithms with a mistake each; ``test_algorithm_sabotage.py`` has what finds each."""

from __future__ import annotations

import broken_algorithms
import unusual_algorithms
from broken_algorithms import AlgorithmTests
from test_algorithm_sabotage import CAUGHT_BY, MISSED, UNUSUAL

for name in ("Fine", *CAUGHT_BY, *MISSED, *UNUSUAL):
    is_unusual = name in unusual_algorithms.__all__
    settings = {"algorithm": getattr(unusual_algorithms if is_unusual else broken_algorithms, name)}
    if is_unusual:
        settings["zero_advantages"] = "step" if name != "PenalisesInRewards" else "never"
    globals()[f"Test{name}"] = type(f"Test{name}", (AlgorithmTests,), settings)
