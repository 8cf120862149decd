"""Names of plugins: those that a user blocks, and which published distribution brings a class, a command or a module.

``plugin_index.json`` is generated from the plugins of this repository; nothing else in the core names one.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Final, Literal, TypeAlias

BLOCK_VARIABLE: Final = "RLPLUG_BLOCK"
"""Environment variable with the names of blocked plugins, separated by commas."""

Index: TypeAlias = Mapping[str, Mapping[str, list[str]]]
"""Names by distribution and kind."""


@functools.cache
def plugin_index() -> Index:
    """Return the names that each published distribution brings, as ``classes``, ``commands`` and ``modules``."""
    index: Index = json.loads(resources.files("rlplug").joinpath("plugin_index.json").read_text())
    return index


def distribution_of(kind: Literal["classes", "commands", "modules"], name: str) -> str | None:
    """Return the published distribution that brings a name, or ``None``."""
    return next((each for each, names in plugin_index().items() if name in names[kind]), None)


def blocked_names(given: Iterable[str] = ()) -> list[str]:
    """Return the names of plugins to leave out: those that are ``given``, and those of ``$RLPLUG_BLOCK``."""
    from_variable = (name.strip() for name in os.environ.get(BLOCK_VARIABLE, "").split(","))
    return sorted({*given, *filter(None, from_variable)})
