"""References in a Hydra configuration: ``${trainer.project_name}``, ``${oc.select:KEY,DEFAULT}``, ``${oc.env:X}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from rlplug_migrate.conversion import Unresolved
from rlplug_migrate.scalars import scalar

_REFERENCE: Final = re.compile(r"\$\{([^${}]+)\}")
"""A reference without another inside."""
_ENVIRONMENT: Final = re.compile(r"\$\{[A-Z][A-Z0-9_]*(?::-[^${}]*)?\}")
"""A variable of the environment, as our configurations write it."""
_MOST_ROUNDS: Final = 20


def resolve_all(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with their references replaced; a value with one that leads nowhere is :class:`Unresolved`."""
    return {name: _resolve(name, value, values) for name, value in values.items() if value != "???"}


def _resolve(name: str, value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        found = [_resolve(name, item, values) for item in value]
        return next((item for item in found if isinstance(item, Unresolved)), found)
    for _ in range(_MOST_ROUNDS):
        if isinstance(value, Unresolved) or not isinstance(value, str):
            return value
        references = [each for each in _REFERENCE.finditer(value) if not _ENVIRONMENT.fullmatch(each[0])]
        if not references:
            return value
        whole, inner = references[0][0], references[0][1]
        found = _lookup(name, inner, values)
        if isinstance(found, Unresolved) or whole == value:
            value = found
        else:
            value = value.replace(whole, "null" if found is None else str(found))
    return Unresolved(str(value), f"not resolved: {value} refers to itself")


def _lookup(name: str, inner: str, values: Mapping[str, Any]) -> Any:
    """Return what the reference ``${inner}`` in the value of ``name`` stands for."""
    resolver, colon, rest = inner.partition(":")
    target, comma, default = (rest if colon else inner).partition(",")
    if resolver == "oc.env":
        return f"${{{target}:-{default}}}" if comma else f"${{{target}}}"
    if colon and resolver != "oc.select":
        return Unresolved(inner, f"not resolved: ${{{inner}}} needs the resolver {resolver}")
    key = _absolute(name, target.strip())
    if key in values and values[key] != "???":
        return values[key]
    if comma:
        return scalar(default.strip())
    return Unresolved(inner, f"not resolved: ${{{inner}}}, whose key is not given")


def _absolute(name: str, target: str) -> str:
    """Return the key that ``target`` names in the value of ``name``; each dot in front is a block further out."""
    path = target.lstrip(".")
    depth = len(target) - len(path)
    return ".".join([*name.split(".")[:-depth], path]) if depth else target
