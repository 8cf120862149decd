"""Registry of the classes that plugins bring: kind -> name -> class. A YAML file names a class by its own name."""

from __future__ import annotations

import importlib
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

from rlplug import interfaces
from rlplug.errors import ConfigError, PluginError, describe, did_you_mean, shorten
from rlplug.plugin_names import distribution_of

KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "rollouts": "RolloutEngine",
        "trainers": "ModelTrainer",
        "algorithms": "Algorithm",
        "rewards": "Reward",
        "environments": "Environment",
        "launchers": "",
        "optimizations": "Optimization",
        "classes": "",
    }
)
"""Base class, of ``rlplug.interfaces``, of the registered classes of each kind; that of launchers is of a plugin, and
``classes`` are all others that YAML names without a module."""

_PLACE: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def kind_of_key(key: str) -> str | None:
    """Return the kind of the classes that a key of the configuration names, such as ``model.rollout``, if it does."""
    section, _, name = key.partition(".")
    kind = f"{name.removesuffix('s')}s"
    return kind if section in ("model", "launch") and kind in KINDS else None


@dataclass(frozen=True)
class Registration:
    """One registered class and where it came from."""

    kind: str
    name: str
    place: str
    """Module and class, ``package.module:Class``."""
    distribution: str
    given: type | None = None
    """The class, where the plugin has imported it."""

    @cached_property
    def factory(self) -> type:
        """The class, whose module is imported at the first use.

        Raises:
            PluginError: It cannot be imported, or lacks the kind's base class.
        """
        return _checked(self.kind, self.given or self._imported(), self.distribution)

    def _imported(self) -> Any:
        module, _, name = self.place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except Exception as error:
            raise PluginError(
                f"{self.distribution} registers {self.name} of {self.kind} as {self.place!r}, whose import raised "
                f"{describe(error)}. Install what it misses, or another version of {self.distribution}."
            ) from error


def _checked(kind: str, factory: Any, distribution: str) -> type:
    base = getattr(interfaces, KINDS[kind]) if KINDS[kind] else object
    if isinstance(factory, type) and issubclass(factory, base):
        return factory
    raise PluginError(
        f"{distribution} registers {factory!r} as one of {kind}: make it a subclass of "
        f"rlplug.interfaces' {base.__name__}."
    )


class Registry:
    """Classes by kind and name. Two classes with one name raise an error that names both owners."""

    def __init__(self) -> None:
        self._registrations: dict[tuple[str, str], Registration] = {}
        self._distribution = "rlplug"
        self.left_out: dict[str, str] = {}
        """Why plugins were left out, by their distributions."""

    def set_owner(self, distribution: str) -> None:
        """Attribute later registrations to ``distribution``; called by the plugin manager."""
        self._distribution = distribution

    def add(self, kind: str, factory: type | str) -> None:
        """Register a class under its name.

        Args:
            kind: One of ``KINDS``.
            factory: The class, or its place, ``package.module:Class``, which is imported when a run names the class.

        Raises:
            PluginError: The kind is unknown, the class lacks the kind's base class, or the name is taken.
        """
        if kind not in KINDS:
            raise PluginError(f"{self._distribution} registers unknown kind {kind!r}: use one of {', '.join(KINDS)}.")
        if isinstance(factory, str):
            if not _PLACE.fullmatch(factory):
                raise PluginError(
                    f"{self._distribution} registers {factory!r} as one of {kind}: write package.module:Class."
                )
            name, place, given = factory.partition(":")[2], factory, None
        else:
            given = _checked(kind, factory, self._distribution)
            name, place = given.__name__, f"{given.__module__}:{given.__qualname__}"
        if taken := self._registrations.get((kind, name)):
            raise PluginError(
                f"{self._distribution} and {taken.distribution} both register {name!r} in {kind}: "
                f"rename one class, or block one plugin (--block NAME or RLPLUG_BLOCK)."
            )
        self._registrations[kind, name] = Registration(kind, name, place, self._distribution, given)

    def names(self, kind: str) -> list[str]:
        """Return the registered names of ``kind``, sorted."""
        return sorted(name for registered_kind, name in self._registrations if registered_kind == kind)

    def get(self, kind: str, name: str) -> type:
        """Return the class registered as ``name``.

        Raises:
            ConfigError: No class has that name; the message lists those that are registered, or what to install.
            PluginError: It cannot be imported.
        """
        if registration := self._registrations.get((kind, name)):
            return registration.factory
        raise ConfigError(self.explain_unknown(kind, name))

    def get_for(self, what: str, name: str) -> Any:
        """Return the class of ``classes`` that does what is asked for, such as by a key.

        Raises:
            ConfigError: No plugin brings it; the message says which one would.
            PluginError: It cannot be imported.
        """
        if ("classes", name) not in self._registrations:
            how = self.how_to_get(distribution_of("classes", name) or name)
            raise ConfigError(f"{what} comes with {how} Or leave it out.")
        return self.get("classes", name)

    def import_named(self, names: Container[str]) -> None:
        """Import the registered classes among ``names``, of any kind: jsonargparse finds those that are imported.

        Raises:
            PluginError: One cannot be imported.
        """
        for (_, name), registration in sorted(self._registrations.items()):
            if name in names:
                _ = registration.factory

    def import_all(self) -> None:
        """Import every registered class, for a help that lists them.

        Raises:
            PluginError: One cannot be imported.
        """
        self.import_named({name for _, name in self._registrations})

    def explain_unknown(self, kind: str, name: str) -> str:
        """Return the error message for a ``name`` that is not registered."""
        installed = f"Registered {kind}: {', '.join(self.names(kind)) or 'none'}."
        message = f"{shorten(name)} is not a known {kind.removesuffix('s')}."
        if package := distribution_of("classes", name):
            return f"{message} It comes with {self.how_to_get(package)} {installed}"
        others = "".join(f" The {line}" for line in self.left_out.values())
        return f"{message}{did_you_mean(name, self.names(kind))} {installed}{others}"

    def how_to_get(self, package: str) -> str:
        """Return a distribution's name and what to do to have what it brings: install it, or mend its plugin."""
        return f"{package}: {self.left_out.get(package, f'pip install {package}.')}"

    def by_distribution(self) -> dict[str, list[Registration]]:
        """Return every registration under the distribution that brought it."""
        result: dict[str, list[Registration]] = {}
        for registration in self._registrations.values():
            result.setdefault(registration.distribution, []).append(registration)
        return result

    def each(self, kind: str) -> Iterator[type]:
        """Yield the classes of ``kind``, each of which is imported when its turn comes."""
        yield from (self.get(kind, name) for name in self.names(kind))

    def classes(self, kind: str) -> dict[str, Any]:
        """Return name -> class for ``kind``."""
        return {name: self.get(kind, name) for name in self.names(kind)}
