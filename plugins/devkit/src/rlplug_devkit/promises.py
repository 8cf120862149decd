"""The kits by kind, and what each of their checks promises."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlplug_devkit.algorithms.conformance import AlgorithmConformance
from rlplug_devkit.claims import Claim, words_of
from rlplug_devkit.engines.conformance import EngineConformance
from rlplug_devkit.hooks.conformance import HooksConformance
from rlplug_devkit.optimizations.conformance import OptimizationConformance
from rlplug_devkit.tasks.data_sources import DataSourceConformance
from rlplug_devkit.tasks.environments import EnvironmentConformance
from rlplug_devkit.tasks.rewards import RewardConformance
from rlplug_devkit.trainers.conformance import TrainerConformance

KITS: Final[Mapping[str, type]] = types.MappingProxyType(
    {
        "algorithm": AlgorithmConformance,
        "reward": RewardConformance,
        "environment": EnvironmentConformance,
        "data source": DataSourceConformance,
        "optimization": OptimizationConformance,
        "engine": EngineConformance,
        "trainer": TrainerConformance,
        "hooks": HooksConformance,
    }
)


@dataclass(frozen=True)
class Promise:
    """What one check of a kit holds a plugin to."""

    check: str
    """Name of the check's method."""
    words: str
    """The promise: the check's name as a sentence's part."""
    detail: str
    """First sentence of the check's docstring, or nothing."""
    applies_to: str
    """What a plugin must claim, or not claim, for the check to apply; empty for all."""


@functools.cache
def promises_of(kit: type) -> tuple[Promise, ...]:
    """Return the promises of a kit, in the order in which pytest runs their checks."""
    found: dict[str, Promise] = {}
    for base in reversed(kit.__mro__):
        for name, value in vars(base).items():
            if name.startswith("test_") and inspect.isfunction(value):
                found[name] = _promise(name, value)
    return tuple(found.values())


def _promise(name: str, check: Any) -> Promise:
    lines = (inspect.getdoc(check) or "").split("\n\n")[0].split()
    claim: Claim | None = vars(check).get("claim")
    applies = "" if claim is None else f"`{claim.capability}`" if claim.is_claimed else f"not `{claim.capability}`"
    return Promise(name, words_of(name), " ".join(lines), applies)
