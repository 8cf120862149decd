"""Checks on optimizations with a mistake each; ``test_optimization_sabotage.py`` has what finds each.

The optimizations of a class run in one process, beside one model without any: those that would change it for the
others have a class of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import broken_optimizations
import broken_passes
import drawn_optimizations
import stated_optimizations
import unusual_optimizations
from broken_optimizations import OptimizationTests
from test_optimization_sabotage import CAUGHT_BY, MISSED, UNUSUAL

from rlplug.interfaces import Optimization
from rlplug.interfaces.memory import ActivationTraits

MODULES: Final = (
    *(broken_optimizations, broken_passes, stated_optimizations, drawn_optimizations),
    unusual_optimizations,
)
ON_TWO_RANKS: Final = ("ReportsItsRank", "ScalesOnOtherRanks")
ON_GEMMA: Final = ("NormsAsLlama",)
WITH_PARTNER: Final = ("ChecksOnlyPlainBlocks", "WrapsTheClass")
ALONE: Final = (
    *("SetsDeterministicAlgorithms", "PatchesTheLibrary", "TruncatesProducts", "RegistersOverSdpa", "ReplacesAnEqual"),
    "WatchesAllModules",
    *WITH_PARTNER,
)


class Together(OptimizationTests):
    names: ClassVar[Sequence[str]]

    def make_optimizations(self) -> Mapping[str, Sequence[Optimization]]:
        found = {name: next(vars(module)[name] for module in MODULES if name in vars(module)) for name in self.names}
        return {name: [optimization()] for name, optimization in found.items()}

    def broken_options(self) -> Mapping[str, Any]:
        return stated_optimizations.BROKEN_OPTIONS

    def expected_defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return stated_optimizations.DEFAULTS

    def expected_claims(self) -> Mapping[str, Mapping[str, Any]]:
        return stated_optimizations.CLAIMS

    def expected_effects(self) -> Mapping[str, Sequence[str]]:
        return stated_optimizations.EFFECTS

    def expected_plans(self) -> Mapping[str, ActivationTraits]:
        return stated_optimizations.PLANS


class TestCorrect(Together):
    names = ("Fine", "Stated", *MISSED, *UNUSUAL)


class TestMistakes(Together):
    with_partner = False
    names = tuple(name for name in CAUGHT_BY if name not in (*ON_TWO_RANKS, *ON_GEMMA, *ALONE))


class TestMistakesOnTwoRanks(Together):
    with_partner = False
    meshes = ("2 ranks",)
    names = ON_TWO_RANKS


class TestMistakesOnGemma(Together):
    with_partner = False
    models = ("gemma3",)
    names = ON_GEMMA


for name in ALONE:
    settings = {"names": (name,), "with_partner": name in WITH_PARTNER}
    globals()[f"Test{name}"] = type(f"Test{name}", (Together,), settings)
