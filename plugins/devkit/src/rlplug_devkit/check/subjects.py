"""What an installed package brings that a kit checks, and how its objects are made."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from rlplug.errors import ConfigError, describe, did_you_mean
from rlplug.plugin_checks import REGISTRATION_PREFIX, PluginRecord, find_plugins, record_of
from rlplug.plugin_manager import PluginManager
from rlplug.registry import Registration

KIND_OF: Final[Mapping[str, str]] = {
    "algorithms": "algorithm",
    "rewards": "reward",
    "environments": "environment",
    "optimizations": "optimization",
    "rollouts": "engine",
    "trainers": "trainer",
}
"""Kinds of kits by kinds of registrations; data sources are registered among the other classes."""
SETTINGS_FILE: Final = "conformance.yaml"
"""File in a package's folder that says how its objects are made for the kits."""


@dataclass(frozen=True)
class Subject:
    """A class, or a module of hooks, to check with a kit."""

    kind: str
    name: str
    place: str
    """``package.module:Class``, or the module of hooks."""
    init_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Attributes of the kit, such as ``zero_advantages``."""
    problem: str = ""
    """Why it cannot be checked."""

    def make(self) -> Any:
        """Return a new object."""
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(module), name)(**self.init_args)


def class_name(subject: Subject) -> str:
    """Return the name of the test class that is made for a subject."""
    return f"Test{subject.name.replace('-', '_')}"


@dataclass(frozen=True)
class Package:
    """An installed distribution, and its subjects."""

    distribution: str
    version: str
    subjects: tuple[Subject, ...]
    unchecked: tuple[str, ...] = ()
    """Classes that no kit is for."""


def package_of(name: str, settings: Path | None = None) -> Package:
    """Return what a package brings, given its distribution's name, its plugin's, or that of its module.

    Args:
        name: The name.
        settings: YAML file with ``init_args``, ``on_gpu`` and ``settings`` by class name; the package's own where not
            given.

    Raises:
        ConfigError: No plugin has that name, or the file is not as it must be.
    """
    points = find_plugins(())
    names = {point: {point.name, record_of(point).distribution, point.module.partition(".")[0]} for point in points}
    mine = [point for point in points if _normal(name) in map(_normal, names[point])]
    if not mine:
        known = sorted({each for of_point in names.values() for each in of_point})
        raise ConfigError(
            f"check {name}: no installed plugin has that name.{did_you_mean(name, known)} Give a distribution, a "
            "plugin or its module; rlplug plugins shows them."
        )
    manager = PluginManager(strict=False)
    distribution = record_of(mine[0]).distribution
    records = [record for record in manager.records if record.distribution == distribution]
    given = _settings(settings or _own_settings(mine[0].module))
    registered = manager.registry.by_distribution().get(distribution, [])
    classes = [_subject(each, given) for each in registered]
    failed = [
        Subject("plugin", record.name, record.name, problem=record.reason) for record in records if not _loaded(record)
    ]
    modules = {point.name: point.module for point in mine}
    hooks = [
        Subject("hooks", record.name, modules[record.name])
        for record in records
        if any(not hook.startswith(REGISTRATION_PREFIX) for hook in record.hooks)
    ]
    unknown = sorted(given.keys() - {each.name for each in registered})
    if unknown:
        raise ConfigError(f"check {name}: its settings name {unknown[0]}, which {distribution} does not register.")
    return Package(
        distribution,
        records[0].version if records else "",
        (*failed, *(subject for subject in classes if subject.kind), *hooks),
        tuple(subject.name for subject in classes if not subject.kind),
    )


def registered_subject(kind: str, name: str) -> tuple[Subject, Registration]:
    """Return a registered class as a subject of its kit, made as its package's conformance.yaml says.

    Args:
        kind: Of registrations: ``rollouts``, ``trainers`` ...
        name: The class's name.

    Raises:
        ConfigError: No installed plugin registers it.
    """
    registry = PluginManager(strict=False).registry
    for each in (each for found in registry.by_distribution().values() for each in found):
        if (each.kind, each.name) == (kind, name):
            return _subject(each, _settings(_own_settings(each.place))), each
    raise ConfigError(registry.explain_unknown(kind, name))


def _loaded(record: PluginRecord) -> bool:
    return record.state == "loaded"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _own_settings(module: str) -> Path | None:
    spec = importlib.util.find_spec(module.partition(".")[0])
    folders: Sequence[str] = (spec.submodule_search_locations or []) if spec is not None else []
    files = [Path(folder) / SETTINGS_FILE for folder in folders]
    return next((file for file in files if file.is_file()), None)


def _settings(file: Path | None) -> dict[str, Mapping[str, Any]]:
    """Return the settings of a file by class name.

    Raises:
        ConfigError: It cannot be read, or is another thing than mappings.
    """
    if file is None:
        return {}
    try:
        read = yaml.safe_load(file.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {describe(error)}.") from error
    allowed = {"init_args", "on_gpu", "settings"}
    is_right = isinstance(read, dict) and all(
        isinstance(each, dict) and each.keys() <= allowed and all(isinstance(part, dict) for part in each.values())
        for each in read.values()
    )
    if not is_right:
        raise ConfigError(
            f"{file} must have, by the name of a class, the keys init_args (arguments of its constructor), on_gpu "
            "(those that differ on a GPU) and settings (attributes of its kit), each a mapping."
        )
    for name, each in read.items():
        for key in each.get("settings", {}):
            if str(key).startswith("test_"):
                raise ConfigError(
                    f"{file}: {name}.settings.{key} replaces a check: say under settings.excused why it does not fit."
                )
    return {str(key): value for key, value in read.items()}


def _subject(registration: Registration, given: Mapping[str, Mapping[str, Any]]) -> Subject:
    """Return a registered class as a subject, with an empty kind where no kit is for it."""
    from rlplug.data.sources import PromptSource

    own = given.get(registration.name, {})
    on_gpu = own.get("on_gpu", {}) if torch.cuda.is_available() else {}
    subject = Subject(
        KIND_OF.get(registration.kind, ""),
        registration.name,
        registration.place,
        {**own.get("init_args", {}), **on_gpu},
        own.get("settings", {}),
    )
    if registration.kind == "launchers":
        return subject
    try:
        factory = registration.factory
    except Exception as error:  # noqa: BLE001 - a module of the package, or what it needs
        return dataclasses.replace(subject, problem=describe(error)) if subject.kind else subject
    if registration.kind == "classes" and issubclass(factory, PromptSource):
        subject = dataclasses.replace(subject, kind="data source")
    return dataclasses.replace(subject, problem=_cannot_be_made(factory, subject.init_args) if subject.kind else "")


def _cannot_be_made(factory: type, arguments: Mapping[str, Any]) -> str:
    """Return in words what the constructor lacks; empty where it lacks nothing."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # an extension's
        return ""
    ordinary = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [
        each.name
        for each in parameters
        if each.kind in ordinary and each.default is inspect.Parameter.empty and each.name not in arguments
    ]
    if not missing:
        return ""
    return f"its constructor needs {', '.join(missing)}: give them under {factory.__name__}.init_args, in --settings"
