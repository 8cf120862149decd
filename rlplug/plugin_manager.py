"""Finds plugins through entry points, checks them, orders them, and says what is loaded.

Every rank builds the same manager: plugins are sorted by name, then by what they declare (``RLPLUG_BEFORE``,
``RLPLUG_AFTER``), and hooks are called in that order. Anything wrong with a plugin stops the run with one message
that names the distribution, its version, the file and the fix, unless the plugin is blocked by name.
"""

from __future__ import annotations

import graphlib
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, entry_points
from types import ModuleType
from typing import Any, Final, Literal

import pluggy
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from rlplug import core_plugin, hookspecs
from rlplug.errors import ConfigError, PluginError, did_you_mean
from rlplug.hookspecs import API_VERSION, ENTRY_POINT_GROUP, WRAPPER_ONLY
from rlplug.registry import Registry

hookimpl: Final = pluggy.HookimplMarker("rlplug")
"""Marks a plugin's implementation of a hook."""

BLOCK_VARIABLE: Final = "RLPLUG_BLOCK"
REGISTRATION_PREFIX: Final = "rlplug_register_"


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
    state: Literal["loaded", "blocked", "failed"] = "loaded"
    reason: str = ""

    def fail(self, problem: str, fix: str) -> PluginError:
        """Mark the plugin as failed and return the error that says so."""
        self.state, self.reason = "failed", problem
        where = f" in {self.file}" if self.file else ""
        return PluginError(
            f"plugin {self.name!r} (distribution {self.distribution} {self.version}){where}: {problem} {fix} "
            f"Or leave the plugin out: --block {self.name}, or {BLOCK_VARIABLE}={self.name}."
        )


class PluginManager:
    """The loaded plugins: their hooks (``manager.hook``), what they registered, and a record of each.

    Args:
        blocked: Entry-point or distribution names to leave out, besides those in ``$RLPLUG_BLOCK``.
        strict: Raise at the first plugin that is wrong. Otherwise record it as failed and go on, which is only for
            showing the table.

    Raises:
        PluginError: A plugin does not import, misspells a hook, takes a registered name, or is for another API.
        ConfigError: A blocked name that no plugin has.
    """

    def __init__(self, blocked: Iterable[str] = (), strict: bool = True) -> None:
        self.registry = Registry()
        self.records: list[PluginRecord] = []
        self._strict = strict
        self._pluggy = pluggy.PluginManager("rlplug")
        self._pluggy.add_hookspecs(hookspecs)
        self.blocked = sorted({*blocked, *filter(None, os.environ.get(BLOCK_VARIABLE, "").split(","))})
        self._load()

    @property
    def hook(self) -> Any:
        """Call a hook: ``manager.hook.rlplug_after_update(metrics=..., step=...)``."""
        return self._pluggy.hook

    def _load(self) -> None:
        modules: dict[str, tuple[ModuleType, PluginRecord]] = {}
        for entry_point in self._entry_points():
            record = _record_of(entry_point)
            self.records.append(record)
            if {record.name, record.distribution} & set(self.blocked):
                record.state, record.reason = "blocked", "by name"
                continue
            try:
                modules[record.name] = (_import_checked(entry_point, record), record)
            except PluginError:
                if self._strict:
                    raise
        self._pluggy.register(core_plugin, name="rlplug")
        _call_registration(core_plugin, self.registry)
        # pluggy calls the plugin that was registered last first
        ordered = _ordered(modules)
        for name in reversed(ordered):
            self._register(*modules[name])
        for name in ordered:
            self._collect_registrations(*modules[name])

    def _entry_points(self) -> list[EntryPoint]:
        found = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: (e.name, e.value))
        known = {e.name for e in found} | {e.dist.name for e in found if e.dist}
        for name in sorted(set(self.blocked) - known):
            raise ConfigError(
                f"cannot block {name!r}: no plugin has that name.{did_you_mean(name, known)} "
                f"Installed: {', '.join(sorted(known)) or 'none'}."
            )
        for first, second in itertools.pairwise(found):
            if first.name == second.name:
                raise PluginError(
                    f"the distributions {_distribution(first)} and {_distribution(second)} both have a plugin named "
                    f"{first.name!r}: uninstall one."
                )
        return found

    def _register(self, module: ModuleType, record: PluginRecord) -> None:
        try:
            self._pluggy.register(module, name=record.name)
        except pluggy.PluginValidationError as error:
            failure = record.fail(f"{error}.", "Take only arguments that rlplug.hookspecs lists for the hook.")
            if self._strict:
                raise failure from error
            self._pluggy.unregister(module)

    def _collect_registrations(self, module: ModuleType, record: PluginRecord) -> None:
        if record.state != "loaded":
            return
        self.registry.set_owner(record.distribution)
        before = {r.name for r in self.registry.by_distribution().get(record.distribution, [])}
        try:
            _call_registration(module, self.registry)
        except Exception as error:
            failure = record.fail(f"registering failed: {error}", "Fix the plugin, or install a version that works.")
            if self._strict:
                raise failure from error
        registered = self.registry.by_distribution().get(record.distribution, [])
        record.registers = [f"{r.kind}/{r.name}" for r in registered if r.name not in before]


def _record_of(entry_point: EntryPoint) -> PluginRecord:
    distribution: Distribution | None = entry_point.dist
    name = distribution.name if distribution else "unknown"
    return PluginRecord(entry_point.name, name, distribution.version if distribution else "unknown")


def _distribution(entry_point: EntryPoint) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "unknown"


def _import_checked(entry_point: EntryPoint, record: PluginRecord) -> ModuleType:
    """Import a plugin's module and check all that can be checked without calling it."""
    try:
        module = entry_point.load()
    except Exception as error:
        raise record.fail(
            f"importing {entry_point.value!r} raised {type(error).__name__}: {error}.",
            f"Install what it misses, or another version of {record.distribution}.",
        ) from error
    if not isinstance(module, ModuleType):
        raise record.fail(f"{entry_point.value!r} is no module.", "Let the entry point name the module alone.")
    record.file = getattr(module, "__file__", "") or ""
    _check_api_range(module, record)
    record.hooks = _checked_hooks(module, record)
    return module


def _check_api_range(module: ModuleType, record: PluginRecord) -> None:
    declared = getattr(module, "RLPLUG_API_VERSION", None)
    if declared is None:
        raise record.fail("it declares no RLPLUG_API_VERSION.", 'Write RLPLUG_API_VERSION = ">=1,<2" in the module.')
    record.api_range = str(declared)
    try:
        supported = SpecifierSet(record.api_range)
    except InvalidSpecifier as error:
        raise record.fail(
            f"RLPLUG_API_VERSION = {declared!r} is no version range.", 'Write it like ">=1,<2".'
        ) from error
    if API_VERSION not in supported:
        raise record.fail(
            f"it supports hook API {declared}, and this rlplug has {API_VERSION}.",
            f"Install a version of {record.distribution} for API {API_VERSION}, or another rlplug.",
        )


def _checked_hooks(module: ModuleType, record: PluginRecord) -> list[str]:
    """Return the hooks that ``module`` implements; misspelled, unmarked and misused ones raise."""
    specified = [name for name in vars(hookspecs) if name.startswith("rlplug_")]
    implemented = []
    for name, function in sorted(vars(module).items()):
        options = getattr(function, "rlplug_impl", None)
        if options is None and not (name.startswith("rlplug_") and callable(function)):
            continue
        if name not in specified:
            raise record.fail(f"there is no hook {name!r}.{did_you_mean(name, specified)}", "Rename the function.")
        if options is None:
            raise record.fail(f"{name} is not marked.", "Put @rlplug.plugin_manager.hookimpl above it.")
        if name in WRAPPER_ONLY and not options["wrapper"]:
            raise record.fail(f"{name} would replace what the core does.", "Mark it @hookimpl(wrapper=True) and yield.")
        implemented.append(name)
    if not implemented:
        raise record.fail("it implements no hook.", "Implement one of those in rlplug.hookspecs.")
    return implemented


def _ordered(modules: dict[str, tuple[ModuleType, PluginRecord]]) -> list[str]:
    """Sort by name, then by RLPLUG_BEFORE and RLPLUG_AFTER; names that are not installed are ignored."""
    after: dict[str, set[str]] = {name: set() for name in sorted(modules)}
    for name, (module, _) in modules.items():
        after[name] |= set(getattr(module, "RLPLUG_AFTER", ())) & modules.keys()
        for later in set(getattr(module, "RLPLUG_BEFORE", ())) & modules.keys():
            after[later].add(name)
    sorter = graphlib.TopologicalSorter(after)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        raise PluginError(
            f"plugins want to run before one another: {' -> '.join(error.args[1])}. "
            "Drop one of their RLPLUG_BEFORE or RLPLUG_AFTER, or block one."
        ) from error
    order: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()])
        order.append(ready.pop(0))
        sorter.done(order[-1])
    return order


def _call_registration(module: ModuleType, registry: Registry) -> None:
    for name, function in sorted(vars(module).items()):
        if name.startswith(REGISTRATION_PREFIX) and callable(function):
            function(registry=registry)


_current: PluginManager | None = None


def plugins() -> PluginManager:
    """Return the process's plugin manager, loading plugins at the first call."""
    return _current or use_plugins(PluginManager())


def use_plugins(manager: PluginManager) -> PluginManager:
    """Make ``manager`` the process's plugin manager: the command line does, after reading ``--block``."""
    global _current
    _current = manager
    return manager


def describe(records: Sequence[PluginRecord]) -> list[dict[str, Any]]:
    """Return the records as plain data, for ``rlplug plugins --json`` and for the run folder."""
    return [dict(vars(record)) for record in records]
