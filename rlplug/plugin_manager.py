"""Plugin manager: finds plugins through entry points, checks and orders them, and records what is loaded.

Every rank builds the same manager: plugins are sorted by name, then by what they declare (``RLPLUG_BEFORE``,
``RLPLUG_AFTER``), and hooks are called in that order. A faulty plugin stops the run with one message that names the
distribution, its version, the file and the fix, unless the plugin is blocked by name. One that cannot be imported is
left out, which a line says: it stops only what names its classes.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType
from typing import Any, Final, TypeAlias

import pluggy

from rlplug import builtin_plugin, hookspecs
from rlplug.errors import PluginError
from rlplug.hookspecs import API_VERSION
from rlplug.interfaces.checks.hooks import GivenMetrics
from rlplug.observability.hook_costs import HookCosts
from rlplug.plugin_checks import REGISTRATION_PREFIX, SPECIFIED, PluginRecord, find_plugins, import_checked, record_of
from rlplug.plugin_names import blocked_names, distribution_of
from rlplug.registry import Registration, Registry

__all__ = ["PluginManager", "PluginRecord", "describe", "hookimpl", "plugins", "use_plugins"]

hookimpl: Final = pluggy.HookimplMarker("rlplug")
"""Decorator that marks a plugin's implementation of a hook."""

CORE: Final = "rlplug"
"""Name of the core among the plugins."""

Modules: TypeAlias = dict[str, tuple[ModuleType, PluginRecord]]
"""Module and record of each plugin, by the plugin's name."""


class PluginManager:
    """The loaded plugins: their hooks (``manager.hook``), the registry of their classes, and a record of each.

    Args:
        blocked: Entry-point or distribution names to leave out, besides those in ``$RLPLUG_BLOCK``.
        strict: Raise at the first faulty plugin. Otherwise record it as failed and go on, which is only for showing
            the table.

    Raises:
        PluginError: A plugin misspells a hook, takes a registered name, or is for another API.
        ConfigError: No plugin has a blocked name.
    """

    def __init__(self, blocked: Iterable[str] = (), strict: bool = True) -> None:
        self.registry = Registry()
        self.records: list[PluginRecord] = []
        self.costs = HookCosts()
        """Seconds and calls of each plugin's hooks in this process."""
        self._strict = strict
        self._pluggy = pluggy.PluginManager("rlplug")
        self._pluggy.add_hookspecs(hookspecs)
        self.blocked = blocked_names(blocked)
        self._load()

    @property
    def hook(self) -> Any:
        """Hooks to call: ``manager.hook.rlplug_after_update(metrics=..., step=...)``."""
        return self._pluggy.hook

    def wraps(self, hook: str) -> bool:
        """Return whether a plugin wraps a hook that the core implements; otherwise the core can call its own part."""
        return len(getattr(self.hook, hook).get_hookimpls()) > 1

    def how_to_get(self, hook: str) -> str:
        """Return which distribution implements a hook, and what to do where nobody does."""
        return self.registry.how_to_get(str(distribution_of("hooks", hook)))

    def observe(self, hook: str, **arguments: Any) -> list[GivenMetrics]:
        """Call an observation hook and return the metrics that each plugin adds, which are numbers by name."""
        added: list[GivenMetrics] = getattr(self.hook, hook)(**arguments)
        return added

    def _load(self) -> None:
        modules: Modules = {CORE: (builtin_plugin, _core_record())}
        self.records.append(modules[CORE][1])
        for entry_point in find_plugins(self.blocked):
            record = record_of(entry_point)
            self.records.append(record)
            if {record.name, record.distribution} & set(self.blocked):
                record.state, record.reason = "blocked", "by name"
                line = f"plugin {record.name!r} is blocked: drop --block {record.name}."
                self.registry.left_out[record.distribution] = line
                continue
            with self._failures():
                if record.name in modules:
                    raise _name_taken(record, modules[record.name][1])
                module = import_checked(entry_point, record)
                if module is None:
                    self._leave_out(record)
                    continue
                for other_module, other in modules.values():
                    if module is other_module:
                        raise record.fail(f"plugin {other.name!r} names the same module.", "Keep one entry point.")
                modules[record.name] = (module, record)
        order = self._ordered(modules)
        # pluggy calls the plugin that was registered last first, and the core comes after all others
        for name in [CORE, *reversed(order)]:
            self._pluggy.register(modules[name][0], name=name)
        self._measure_hooks()
        for name in [CORE, *order]:
            with self._failures():
                self._collect_registrations(*modules[name])

    def call_order(self) -> dict[str, list[pluggy.HookImpl]]:
        """Return who implements each hook, in the order of the calls; a wrapper surrounds all that come after it."""
        return {
            name.removeprefix("rlplug_"): list(reversed(implementations))
            for name in SPECIFIED
            if (implementations := getattr(self.hook, name).get_hookimpls())
        }

    def _measure_hooks(self) -> None:
        """Count the costs of all implementations, and check those of plugins. Registrations are called elsewhere."""
        for name in SPECIFIED:
            for implementation in getattr(self.hook, name).get_hookimpls():
                plugin, hook = implementation.plugin_name, name.removeprefix("rlplug_")
                implementation.function = self.costs.timed(
                    plugin, hook, implementation.function, implementation.wrapper, is_checked=plugin != CORE
                )

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise the error of a faulty plugin when ``strict``; otherwise leave it to the plugin's record."""
        try:
            yield
        except PluginError:
            if self._strict:
                raise

    def _leave_out(self, record: PluginRecord) -> None:
        line = f"plugin {record.name!r} of {record.distribution} {record.version} was left out: {record.reason}"
        self.registry.left_out[record.distribution] = line
        if self._strict:
            from lightning.pytorch.utilities import rank_zero_info

            rank_zero_info(line)

    def _ordered(self, modules: Modules) -> list[str]:
        """Return plugin names in call order, without the core's, and remove plugins in a cycle from ``modules``."""
        while True:
            try:
                return _sorted({name: module for name, (module, _) in modules.items() if name != CORE})
            except graphlib.CycleError as error:
                circle: list[str] = error.args[1]
                described = " -> ".join(f"{name} ({modules[name][1].distribution})" for name in circle)
                for name in circle[1:]:  # the first is the last again
                    failure = modules.pop(name)[1].fail(
                        f"each of these wants to run before the next: {described}.",
                        "Drop one of their RLPLUG_BEFORE or RLPLUG_AFTER.",
                    )
                with self._failures():
                    raise failure from error

    def _collect_registrations(self, module: ModuleType, record: PluginRecord) -> None:
        self.registry.set_owner(record.distribution)
        before = self._registered_by(record)
        try:
            _call_registration(module, self.registry)
        except Exception as error:
            problem = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}."
            fix = f"Another version of {record.distribution} may fit."
            raise record.fail(f"registering failed: {problem}", fix) from error
        finally:
            record.registers = [f"{r.kind}/{r.name}" for r in self._registered_by(record) if r not in before]

    def _registered_by(self, record: PluginRecord) -> list[Registration]:
        return list(self.registry.by_distribution().get(record.distribution, []))


def _core_record() -> PluginRecord:
    hooks = sorted(name for name in vars(builtin_plugin) if name.startswith("rlplug_"))
    return PluginRecord(CORE, "rlplug", version("rlplug"), builtin_plugin.__file__, API_VERSION, hooks=hooks)


def _name_taken(record: PluginRecord, other: PluginRecord) -> PluginError:
    return record.fail(
        f"{other.distribution} {other.version} has a plugin of that name too.",
        f"Rename an entry point, uninstall one, or block it by its distribution: --block {record.distribution}.",
    )


def _sorted(modules: dict[str, ModuleType]) -> list[str]:
    """Sort by name, then by RLPLUG_BEFORE and RLPLUG_AFTER; names that are not installed are ignored."""
    earlier: dict[str, set[str]] = {name: set() for name in sorted(modules)}
    for name, module in modules.items():
        earlier[name] |= set(getattr(module, "RLPLUG_AFTER", ())) & modules.keys()
        for later in set(getattr(module, "RLPLUG_BEFORE", ())) & modules.keys():
            earlier[later].add(name)
    sorter = graphlib.TopologicalSorter(earlier)
    sorter.prepare()
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


def forget_plugins() -> None:
    """Let the next call of :func:`plugins` load them again: a command of another command line may block others."""
    global _current
    _current = None


def use_plugins(manager: PluginManager) -> PluginManager:
    """Make ``manager`` the process's plugin manager."""
    global _current
    _current = manager
    return manager


def describe(records: Sequence[PluginRecord]) -> list[dict[str, Any]]:
    """Return the records as plain data, for ``rlplug plugins --json`` and for the run folder."""
    return [dict(vars(record)) for record in records]
