"""Checks on algorithms with a mistake each; ``test_algorithm_sabotage.py`` has what finds each."""

from __future__ import annotations

from typing import Any

import broken_advantages
import broken_algorithms
import broken_claims
import broken_equations
import broken_losses
import broken_repeats
import drawn_algorithms
import unusual_algorithms
from broken_algorithms import AlgorithmTests
from test_algorithm_sabotage import CAUGHT_BY, MISSED, UNUSUAL

MODULES = (
    *(broken_advantages, broken_losses, broken_claims, broken_repeats, broken_equations),
    *(drawn_algorithms, unusual_algorithms, broken_algorithms),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "AddsTheDistanceToRewards": {"zero_advantages": "never"},
    "Fine": {"examples": lambda _: [broken_equations.EXAMPLE], "accepted_options": [{}]},
    "HalvesItsAdvantages": {"examples": lambda _: [broken_equations.EXAMPLE]},
    "TakesAnyScale": {"accepted_options": [{"scale": 0.5}], "refused_options": [{"scale": -1.0}]},
}
for name in ("Fine", *CAUGHT_BY, *MISSED, *UNUSUAL):
    settings: dict[str, Any] = {"algorithm": next(vars(module)[name] for module in MODULES if name in vars(module))}
    if name in unusual_algorithms.__all__ or issubclass(settings["algorithm"], unusual_algorithms.FollowsTheEntropy):
        settings["zero_advantages"] = "step" if name != "PenalisesInRewards" else "never"
    settings |= SETTINGS.get(name, {})
    globals()[f"Test{name}"] = type(f"Test{name}", (AlgorithmTests,), settings)
