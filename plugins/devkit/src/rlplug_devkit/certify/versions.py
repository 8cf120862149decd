"""Versions that a record of a certification names: those that decide whether it speaks of a set, and all others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlplug.plugin_checks import find_plugins, record_of
from rlplug_devkit.certify.records import public_version

DECISIVE: Final = ("torch", "transformers", "lightning", "jsonargparse")
"""Libraries whose versions a record is of, besides rlplug's distributions and the engine's and trainer's libraries."""


def packages_of(distributions: Iterable[str]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the versions that decide, and those of all others that are required, by name.

    Args:
        distributions: Those of the engine and the trainer.
    """
    libraries = sorted(_libraries({*distributions}))
    required = _required(["rlplug", *distributions, *DECISIVE])
    ours = [name for name in required if name.split("-")[0] == "rlplug"]
    decisive = {name: public_version(version(name)) for name in sorted({*ours, *DECISIVE, *libraries})}
    tools = {name: version(name) for name in ("rlplug-devkit", "rlplug-algos", "pytest")}
    others = {name: found for name, found in sorted({**required, **tools}.items()) if name not in decisive}
    return decisive, others


def _libraries(distributions: set[str]) -> set[str]:
    """Return the distributions of the modules in ``RLPLUG_LIBRARIES`` of plugins that are imported."""
    points = [point for point in find_plugins(()) if record_of(point).distribution in distributions]
    modules = {name for point in points for name in getattr(sys.modules.get(point.module), "RLPLUG_LIBRARIES", ())}
    owners: Mapping[str, Sequence[str]] = packages_distributions()
    return {canonicalize_name(owner) for module in modules for owner in owners.get(module, ())}


def _required(names: Sequence[str]) -> dict[str, str]:
    """Return the installed versions of distributions and of all that they require, without extras."""
    found: dict[str, str] = {}
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
        requirements = [Requirement(text) for text in requires(name) or ()]
        waiting += [
            canonicalize_name(each.name)
            for each in requirements
            if each.marker is None or each.marker.evaluate({"extra": ""})
        ]
    return found
