"""Versions of an engine's library that a plugin knows, and fields of its classes, which are read in its source."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from rlplug.errors import ConfigError


@dataclass(frozen=True)
class SupportedVersions:
    """The versions of an engine's library that a plugin was made for, and how to get one."""

    engine: str
    """Name of the engine, for messages."""
    plugin: str
    """The plugin's distribution."""
    oldest: Version
    newest: Version
    """The first that is too new."""
    install: str
    """What to do to install one."""

    def require_installed(self, name: str) -> None:
        """Look for the library, without importing it.

        Raises:
            ConfigError: It is not installed.
        """
        if importlib.util.find_spec(name) is None:
            raise self._missing()

    def require_module(self, name: str) -> Version:
        """Import the library, and return its version.

        Raises:
            ConfigError: It is not installed, cannot be imported, or is of another version.
        """
        try:
            module = importlib.import_module(name)
        except ImportError as problem:
            if problem.name == name:
                raise self._missing() from None
            raise ConfigError(
                f"{self.engine} is installed and cannot be imported ({problem}): {self.install}."
            ) from problem
        return self.require(Version(str(module.__version__)))

    def require_distribution(self, *names: str) -> Version:
        """Return the version of the first of these distributions that is installed, without importing it.

        Raises:
            ConfigError: None is installed, or that one is of another version.
        """
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return self.require(Version(importlib.metadata.version(name)))
        raise self._missing()

    def require(self, version: Version, place: str | None = None) -> Version:
        """Return ``version``, if the plugin knows it.

        Args:
            place: Where it runs, such as ``at http://10.0.0.7:8000``; ``None`` for the installed one.

        Raises:
            ConfigError: It does not.
        """
        if self.oldest <= Version(version.base_version) < self.newest:
            return version
        state, remedy = ("is installed", f": {self.install}") if place is None else (f"runs {place}", "")
        raise ConfigError(
            f"{self.engine} {version} {state}, and {self.plugin} knows {self.oldest} up to, not including, "
            f"{self.newest}{remedy}."
        )

    def _missing(self) -> ConfigError:
        return ConfigError(f"model.rollout needs {self.engine}, which is not installed: {self.install}.")


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is installed"
    assert spec.submodule_search_locations, f"{name} is a package"
    return Path(next(iter(spec.submodule_search_locations)))


def declared_fields(source: str) -> dict[str, set[str]]:
    """Return the names that each class of a module declares with a type in its body, as dataclasses do.

    Args:
        source: The module's text. To import it may take seconds, and change the process.
    """
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            targets = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
            found[node.name] = {target.id for target in targets if isinstance(target, ast.Name)}
    return found
