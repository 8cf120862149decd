"""Top-level modules that the sources of a distribution import, read from their syntax."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path

from distributions import Distribution
from packaging.utils import canonicalize_name


class _Imports(ast.NodeVisitor):
    """``at_start`` of a module, and ``later``: in a function, or where a failure is caught. Those of types are none."""

    def __init__(self) -> None:
        self.at_start: set[str] = set()
        self.later: set[str] = set()
        self._is_later = False

    def visit_If(self, node: ast.If) -> None:
        body = node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else [node.test, *node.body, *node.orelse]
        for each in body:
            self.visit(each)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Try) -> None:
        before, self._is_later = self._is_later, True
        self.generic_visit(node)
        self._is_later = before

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that ast calls
    visit_Try = visit_FunctionDef  # noqa: N815

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and node.module is not None:
            self._add(node.module)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if ast.unparse(node.func) == "importlib.import_module" and isinstance(node.args[0], ast.Constant):
            self._add(str(node.args[0].value))

    def _add(self, module: str) -> None:
        (self.later if self._is_later else self.at_start).add(module.partition(".")[0])


def sources(distribution: Distribution) -> list[Path]:
    """Return the Python files that a distribution installs."""
    return [file for folder in package_folders(distribution) for file in sorted(folder.rglob("*.py"))]


def package_folders(distribution: Distribution) -> list[Path]:
    """Return the folders of the packages that a distribution installs."""
    source = distribution.folder / "src"
    return [(source if source.is_dir() else distribution.folder) / package for package in distribution.packages]


def imported(distribution: Distribution) -> tuple[set[str], set[str]]:
    """Return top-level modules that it imports at the start of its modules, and those that it imports later.

    The standard library and its own packages are left out.
    """
    found = _Imports()
    for file in sources(distribution):
        found.visit(ast.parse(file.read_text()))
    known = sys.stdlib_module_names | {*distribution.packages}
    return found.at_start - known, found.later - known


def providers(module: str) -> set[str]:
    """Return the distributions that have a top-level module; one that is not installed is called as its module is."""
    found = _installed().get(module, [module])
    return {canonicalize_name(name) for name in found}


@functools.cache
def _installed() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()
