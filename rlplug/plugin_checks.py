"""Checks of a plugin before it is registered: hook API version, declared order, and the hooks that it implements."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Final, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from rlplug import hookspecs
from rlplug.errors import ConfigError, PluginError, did_you_mean
from rlplug.hookspecs import API_VERSION, ENTRY_POINT_GROUP, WRAPPER_ONLY
from rlplug.plugin_names import BLOCK_VARIABLE, local_names

REGISTRATION_PREFIX: Final = "rlplug_register_"
LOCAL: Final = "local"
"""In place of a version, for a plugin that ``-p`` names and no distribution brings."""
UNUSED_MARKS: Final = ("tryfirst", "trylast", "hookwrapper", "optionalhook", "specname")
"""Options of pluggy that would void the declared order or the checks here."""

SPECIFIED: Final = {
    name: inspect.signature(hook).parameters for name, hook in vars(hookspecs).items() if name.startswith("rlplug_")
}
"""Parameters of every hook, by the hook's name."""


@dataclass
class PluginRecord:
    """One plugin as ``rlplug plugins`` shows it."""

    name: str
    distribution: str
    version: str
    file: str = ""
    api_range: str = ""
    registers: list[str] = field(default_factory=list)
    hooks: list[str] = field(default_factory=list)
    state: Literal["loaded", "blocked", "failed", "installed"] = "loaded"
    """``installed`` for a plugin that was found and not imported."""
    reason: str = ""

    def fail(self, problem: str, fix: str) -> PluginError:
        """Mark the plugin as failed and return the error that says so."""
        self.state, self.reason = "failed", f"{problem} {fix}"
        where = f" in {self.file}" if self.file else ""
        if self.version == LOCAL:
            return PluginError(f"the module {self.name!r}, given with -p{where}: {self.reason}")
        return PluginError(
            f"plugin {self.name!r} (distribution {self.distribution} {self.version}){where}: {self.reason} "
            f"Or leave the plugin out: --block {self.name}, or {BLOCK_VARIABLE}={self.name}."
        )


def find_plugins(blocked: Iterable[str]) -> list[EntryPoint]:
    """Return the installed plugins by name, then the local ones, without importing them.

    Args:
        blocked: Entry-point or distribution names, which must be there.

    Raises:
        ConfigError: No plugin has a blocked name.
    """
    installed = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: (e.name, record_of(e).distribution))
    found = [*installed, *(EntryPoint(name, name, ENTRY_POINT_GROUP) for name in local_names())]
    known = {name for e in found for name in (e.name, record_of(e).distribution)}
    for name in sorted(set(blocked) - known):
        raise ConfigError(
            f"cannot block {name!r}: no plugin has that name.{did_you_mean(name, known)} "
            f"Installed: {', '.join(sorted(known)) or 'none'}."
        )
    return found


def record_of(entry_point: EntryPoint) -> PluginRecord:
    """Return the record of a plugin that is not imported yet."""
    if entry_point.dist is None:
        return PluginRecord(entry_point.name, entry_point.name, LOCAL)
    return PluginRecord(entry_point.name, entry_point.dist.name, entry_point.dist.version)


def import_checked(entry_point: EntryPoint, record: PluginRecord) -> ModuleType | None:
    """Import a plugin's module and check all that can be checked without calling it.

    Returns:
        The module; ``None`` where it cannot be imported, for the reason in ``record``.

    Raises:
        PluginError: A check failed, or a local plugin, which somebody has named, cannot be imported.
    """
    if record.version == LOCAL and (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    record.file = _file_of(entry_point)
    try:
        module = entry_point.load()
    except Exception as error:
        failure = record.fail(
            f"importing {entry_point.value!r} raised {type(error).__name__}: {error}.",
            f"Install what it misses, or another version of {record.distribution}.",
        )
        if record.version == LOCAL:
            raise failure from error
        return None
    if not isinstance(module, ModuleType):
        raise record.fail(f"{entry_point.value!r} is not a module.", "Let the entry point name the module alone.")
    _check_api_range(module, record)
    _check_order(module, record)
    _check_hooks(module, record)
    return module


def _file_of(entry_point: EntryPoint) -> str:
    """Return the file of the plugin's module, or of its package when the module cannot be found."""
    module = entry_point.value.partition(":")[0].strip()
    for name in (module, module.partition(".")[0]):
        with contextlib.suppress(Exception):  # loading the entry point reports what is wrong
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin:
                return spec.origin
    return ""


def _check_api_range(module: ModuleType, record: PluginRecord) -> None:
    declared = getattr(module, "RLPLUG_API_VERSION", None)
    if declared is None and record.version == LOCAL:
        return  # it is written for the rlplug that it lies beside
    if declared is None:
        raise record.fail("it declares no RLPLUG_API_VERSION.", 'Write RLPLUG_API_VERSION = ">=3,<4" in the module.')
    record.api_range = str(declared)
    try:
        supported = SpecifierSet(record.api_range)
    except InvalidSpecifier as error:
        raise record.fail(
            f"RLPLUG_API_VERSION = {declared!r} is not a version range.", 'Write it like ">=3,<4".'
        ) from error
    if API_VERSION not in supported:
        raise record.fail(
            f"it supports hook API {declared}, and this rlplug has {API_VERSION}.",
            f"Install a version of {record.distribution} for API {API_VERSION}, or another rlplug.",
        )


def _check_order(module: ModuleType, record: PluginRecord) -> None:
    for key in ("RLPLUG_BEFORE", "RLPLUG_AFTER"):
        declared = getattr(module, key, ())
        if not isinstance(declared, tuple | list | set | frozenset):
            raise record.fail(f"{key} = {declared!r} is not a tuple.", f"Write {key} = ({str(declared)!r},).")


def _check_hooks(module: ModuleType, record: PluginRecord) -> None:
    """Record the hooks that ``module`` implements; raise for misspelled, unmarked and misused ones."""
    for name, function in sorted(vars(module).items()):
        marks = getattr(function, "rlplug_impl", None) if inspect.isroutine(function) else None
        if marks is None and not (name.startswith("rlplug_") and callable(function)):
            continue
        if name not in SPECIFIED:
            raise record.fail(f"there is no hook {name!r}.{did_you_mean(name, SPECIFIED)}", "Rename the function.")
        if marks is None:
            raise record.fail(f"{name} is not marked.", "Put @rlplug.plugin_manager.hookimpl above it.")
        _check_marks(name, function, marks, record)
        _check_arguments(name, function, record)
        if name in hookspecs.DEPRECATED:
            told = f"plugin {record.name!r} ({record.distribution} {record.version}) implements {name}"
            warnings.warn(f"{told}, which is deprecated {hookspecs.DEPRECATED[name]}.", FutureWarning, stacklevel=2)
        record.hooks.append(name)
    if not record.hooks:
        raise record.fail("it implements no hook.", "Implement one of those in rlplug.hookspecs.")


def _check_marks(name: str, function: Callable[..., Any], marks: Mapping[str, Any], record: PluginRecord) -> None:
    for mark in UNUSED_MARKS:
        if marks.get(mark):
            raise record.fail(
                f"{name} is marked {mark}, which rlplug does not use.",
                "Drop it: RLPLUG_BEFORE and RLPLUG_AFTER set the order, and wrapper=True makes a wrapper.",
            )
    if name in WRAPPER_ONLY and not marks["wrapper"]:
        raise record.fail(f"{name} would replace what the core does.", "Mark it @hookimpl(wrapper=True) and yield.")
    if name.startswith(REGISTRATION_PREFIX) and marks["wrapper"]:
        raise record.fail(f"{name} cannot be wrapped.", "Mark it @hookimpl, and add the plugin's own classes.")
    if marks["wrapper"] and not inspect.isgeneratorfunction(function):
        raise record.fail(f"{name} is a wrapper and does not yield.", "Write result = yield, and return a result.")
    if not marks["wrapper"] and inspect.isgeneratorfunction(function):
        raise record.fail(f"{name} yields but is not a wrapper.", "Return instead, or mark it @hookimpl(wrapper=True).")


def _check_arguments(name: str, function: Callable[..., Any], record: PluginRecord) -> None:
    for argument in inspect.signature(function).parameters.values():
        if argument.name not in SPECIFIED[name]:
            raise record.fail(
                f"{name} takes {argument.name!r}, which the hook does not have."
                f"{did_you_mean(argument.name, SPECIFIED[name])}",
                f"Its arguments are {', '.join(SPECIFIED[name])}: take those that you use.",
            )
        if argument.default is not argument.empty:
            raise record.fail(
                f"{name} has a default for {argument.name!r}, and pluggy passes no argument that has one.",
                "Drop the default.",
            )
