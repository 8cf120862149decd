"""Names of plugins: those that a user blocks, and which published distribution brings a class, a command or a module.

``plugin_index.json`` is generated from the plugins of this repository; nothing else in the core names one.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.metadata import distributions
from typing import Any, Final, Literal, TypedDict

BLOCK_VARIABLE: Final = "RLPLUG_BLOCK"
"""Environment variable with the names of blocked plugins, separated by commas."""


LOCAL_VARIABLE: Final = "RLPLUG_PLUGINS"
"""Environment variable with the modules of local plugins, separated by commas, as ``-p`` gives them."""


class Published(TypedDict):
    """Names that a published distribution brings."""

    classes: list[str]
    commands: list[str]
    hooks: list[str]
    """Those that it implements, registrations excepted."""
    modules: dict[str, str]
    """Its package, and modules that the core had before it, each with the name that it has now."""


@functools.cache
def plugin_index() -> Mapping[str, Published]:
    """Return what each published distribution brings, by its name."""
    index: Mapping[str, Published] = json.loads(resources.files("rlplug").joinpath("plugin_index.json").read_text())
    return index


def distribution_of(kind: Literal["classes", "commands", "hooks"], name: str) -> str | None:
    """Return the published distribution that brings a name, or ``None``."""
    return next((each for each, names in plugin_index().items() if name in names[kind]), None)


def missing_distribution(kind: Literal["classes", "commands"], name: str) -> str | None:
    """Return the published distribution that brings a name, where it is not installed."""
    found = distribution_of(kind, name)
    return found if found is not None and not list(distributions(name=found)) else None


class MovedModules:
    """Last finder of imports: it finds nothing, and says where a module of the core is that a distribution has now."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if not name.startswith("rlplug."):
            return
        moved = {old: (new, each) for each, names in plugin_index().items() for old, new in names["modules"].items()}
        for old in sorted(moved, key=len, reverse=True):  # a part of a package may be elsewhere than the rest
            if name == old or name.startswith(f"{old}."):
                new, each = moved[old]
                raise ModuleNotFoundError(
                    f"{old} is {new} of {each} now: pip install {each}, and import {new}", name=name
                )


def blocked_names(given: Iterable[str] = ()) -> list[str]:
    """Return the names of plugins to leave out: those that are ``given``, and those of ``$RLPLUG_BLOCK``."""
    return sorted({*given, *_names_in(BLOCK_VARIABLE)})


def local_names(given: Iterable[str] = ()) -> list[str]:
    """Return the modules of local plugins: those that are ``given``, and those of ``$RLPLUG_PLUGINS``, each once."""
    return list(dict.fromkeys([*_names_in(LOCAL_VARIABLE), *given]))


def _names_in(variable: str) -> list[str]:
    return [name for part in os.environ.get(variable, "").split(",") if (name := part.strip())]
