"""Names of plugins: those that a user blocks, and which published distribution brings a class or a command.

``plugin_index.json`` is generated from the plugins of this repository; nothing else in the core names one.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.metadata import distributions
from typing import Final, Literal, TypedDict

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


def blocked_names(given: Iterable[str] = ()) -> list[str]:
    """Return the names of plugins to leave out: those that are ``given``, and those of ``$RLPLUG_BLOCK``."""
    return sorted({*given, *_names_in(BLOCK_VARIABLE)})


def local_names(given: Iterable[str] = ()) -> list[str]:
    """Return the modules of local plugins: those that are ``given``, and those of ``$RLPLUG_PLUGINS``, each once."""
    return list(dict.fromkeys([*_names_in(LOCAL_VARIABLE), *given]))


def _names_in(variable: str) -> list[str]:
    return [name for part in os.environ.get(variable, "").split(",") if (name := part.strip())]
