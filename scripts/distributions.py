"""Distributions of this repository, found from their pyproject.toml: the core at its root, each plugin in plugins/."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Distribution:
    """A folder with a pyproject.toml."""

    folder: Path

    @cached_property
    def project(self) -> dict[str, Any]:
        """The ``[project]`` table."""
        table: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        return table

    @property
    def name(self) -> str:
        """Name under which pip knows it."""
        return str(self.project["name"])

    @property
    def version(self) -> str:
        return str(self.project["version"])

    @property
    def plugins(self) -> list[str]:
        """Names of the plugins that it registers."""
        return sorted(self.project.get("entry-points", {}).get("rlplug.plugins", {}))

    @property
    def commands(self) -> list[str]:
        """Names of the commands of ``rlplug`` that it brings."""
        return sorted(self.project.get("entry-points", {}).get("rlplug.commands", {}))

    @property
    def requires(self) -> set[str]:
        """Names of the distributions that it always requires."""
        return {re.match(r"[\w.-]+", each)[0] for each in self.project.get("dependencies", [])}  # type: ignore[index]

    @property
    def packages(self) -> list[str]:
        """Packages that it installs."""
        source = self.folder / "src"
        found = (source if source.is_dir() else self.folder).glob("rlplug*/__init__.py")
        return sorted(file.parent.name for file in found)


def plugin_distributions(root: Path = ROOT) -> list[Distribution]:
    """Return the distributions under ``plugins/``, sorted by folder."""
    return [Distribution(file.parent) for file in sorted(root.glob("plugins/*/pyproject.toml"))]


def all_distributions(root: Path = ROOT) -> list[Distribution]:
    """Return the core, and behind it its plugins."""
    return [Distribution(root), *plugin_distributions(root)]
