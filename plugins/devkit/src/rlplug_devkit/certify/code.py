"""Digests of the code that ran: between releases, code changes and its version does not."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from rlplug_devkit.certify.records import FOLDER

NOT_CODE: Final = frozenset({FOLDER, "__pycache__"})


def digests_of(distributions: Iterable[str]) -> dict[str, str]:
    """Return the digest of the code of each distribution, by its normalised name; those without code have none."""
    found = {canonicalize_name(name): digest_of(name) for name in distributions}
    return {name: digest for name, digest in sorted(found.items()) if digest}


def digest_of(name: str) -> str:
    """Return the SHA-256 of a distribution's Python files with their paths, as they are installed or linked.

    It is empty where the distribution is not installed, or where no Python file of it is found.
    """
    content = hashlib.sha256()
    files = [file for package in _packages(name) for file in _python_files(package)]
    for path, file in sorted(files):
        content.update(f"{path} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return content.hexdigest() if files else ""


def _packages(name: str) -> set[str]:
    """Return the top-level packages of a distribution: those that its build names, and those of its entry points."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return set()
    of_points = {point.module.partition(".")[0] for point in found.entry_points}
    return of_points | set((found.read_text("top_level.txt") or "").split())


def _python_files(package: str) -> list[tuple[str, Path]]:
    """Return the Python files of a package, without importing it, and each one's path from beside the package."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        return [(f"{package}.py", Path(spec.origin))] if spec.has_location and spec.origin else []
    folders = map(Path, spec.submodule_search_locations)
    paths = [(file.relative_to(folder), file) for folder in folders for file in folder.rglob("*.py")]
    return [(f"{package}/{path.as_posix()}", file) for path, file in paths if not NOT_CODE & set(path.parts)]
