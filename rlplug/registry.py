"""Registry of the classes that plugins bring: kind -> name -> class. A YAML file names a class by its own name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

from rlplug.errors import ConfigError, PluginError, did_you_mean
from rlplug.interfaces.algorithm import Algorithm
from rlplug.interfaces.environment import Environment
from rlplug.interfaces.launcher import Launcher
from rlplug.interfaces.optimization import Optimization
from rlplug.interfaces.reward import Reward
from rlplug.interfaces.rollout import RolloutEngine
from rlplug.interfaces.trainer import ModelTrainer

KINDS: Final[Mapping[str, type]] = MappingProxyType(
    {
        "rollouts": RolloutEngine,
        "trainers": ModelTrainer,
        "algorithms": Algorithm,
        "rewards": Reward,
        "environments": Environment,
        "launchers": Launcher,
        "optimizations": Optimization,
    }
)
"""Base class of the registered classes of each kind."""


def _read_plugin_index() -> Mapping[str, str]:
    """Read class name -> distribution from the file that scripts/write_plugin_index.py writes."""
    text = resources.files("rlplug").joinpath("plugin_index.json").read_text()
    names: dict[str, list[str]] = json.loads(text)
    return MappingProxyType({name: distribution for distribution, mine in names.items() for name in mine})


KNOWN_DISTRIBUTIONS: Final = _read_plugin_index()
"""Distributions of the classes of published plugins, by class name: an error names the package to install."""


@dataclass(frozen=True)
class Registration:
    """One registered class and where it came from."""

    kind: str
    name: str
    factory: type
    distribution: str


class Registry:
    """Classes by kind and name. Two classes with one name raise an error that names both owners."""

    def __init__(self) -> None:
        self._registrations: dict[tuple[str, str], Registration] = {}
        self._distribution = "rlplug"

    def set_owner(self, distribution: str) -> None:
        """Attribute later registrations to ``distribution``; called by the plugin manager."""
        self._distribution = distribution

    def add(self, kind: str, factory: type) -> None:
        """Register ``factory`` under its class name.

        Raises:
            PluginError: The kind is unknown, the class lacks the kind's base class, or the name is taken.
        """
        if kind not in KINDS:
            raise PluginError(f"{self._distribution} registers unknown kind {kind!r}: use one of {', '.join(KINDS)}.")
        if not (isinstance(factory, type) and issubclass(factory, KINDS[kind])):
            raise PluginError(
                f"{self._distribution} registers {factory!r} as one of {kind}: make it a subclass of "
                f"rlplug.interfaces' {KINDS[kind].__name__}."
            )
        key = (kind, factory.__name__)
        if taken := self._registrations.get(key):
            raise PluginError(
                f"{self._distribution} and {taken.distribution} both register {factory.__name__!r} in {kind}: "
                f"rename one class, or block one plugin (--block NAME or RLPLUG_BLOCK)."
            )
        self._registrations[key] = Registration(kind, factory.__name__, factory, self._distribution)

    def names(self, kind: str) -> list[str]:
        """Return the registered names of ``kind``, sorted."""
        return sorted(name for registered_kind, name in self._registrations if registered_kind == kind)

    def get(self, kind: str, name: str) -> type:
        """Return the class registered as ``name``.

        Raises:
            ConfigError: No class has that name; the message lists those that are registered, or what to install.
        """
        if registration := self._registrations.get((kind, name)):
            return registration.factory
        raise ConfigError(self.explain_unknown(kind, name))

    def explain_unknown(self, kind: str, name: str) -> str:
        """Return the error message for a ``name`` that is not registered."""
        installed = ", ".join(self.names(kind)) or "none"
        message = f"{name!r} is not a known {kind.removesuffix('s')}."
        if package := KNOWN_DISTRIBUTIONS.get(name):
            return f"{message} It comes with {package}: pip install {package}. Registered {kind}: {installed}."
        return f"{message}{did_you_mean(name, self.names(kind))} Registered {kind}: {installed}."

    def by_distribution(self) -> dict[str, list[Registration]]:
        """Return every registration under the distribution that brought it."""
        result: dict[str, list[Registration]] = {}
        for registration in self._registrations.values():
            result.setdefault(registration.distribution, []).append(registration)
        return result

    def classes(self, kind: str) -> dict[str, Any]:
        """Return name -> class for ``kind``."""
        return {name: self._registrations[kind, name].factory for name in self.names(kind)}
