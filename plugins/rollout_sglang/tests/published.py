"""SGLang's source as it is published, read from its wheels; nothing of it is imported."""

from __future__ import annotations

import ast
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

VARIABLE = "RLPLUG_SGLANG_WHEELS"
FOLDER = Path(os.environ.get(VARIABLE) or Path(__file__).parents[3] / "models" / "sglang-wheels")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Published:
    """One version's source."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.package = zipfile.Path(_wheel(version), "sglang/")
        self._modules: dict[str, ast.Module] = {}

    def text(self, module: str) -> str:
        """Return the source of a module, named as it is imported."""
        names = module.split(".")
        assert names[0] == "sglang"
        for path in ("/".join(names[1:]) + ".py", "/".join([*names[1:], "__init__.py"])):
            if (self.package / path).is_file():
                return (self.package / path).read_text()
        raise AssertionError(f"SGLang {self.version} has no module {module}")

    def module(self, name: str) -> ast.Module:
        """Return a module's syntax tree."""
        if name not in self._modules:
            self._modules[name] = ast.parse(self.text(name))
        return self._modules[name]

    def names(self, module: str) -> set[str]:
        """Return what a module defines or imports at its top level."""
        found: set[str] = set()
        for node in self.module(module).body:
            if isinstance(node, ast.ClassDef | Function):
                found.add(node.name)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                    found |= self.names(f"{module}.{node.module}" if node.level else str(node.module))
                found |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        return found

    def cls(self, module: str, name: str) -> ast.ClassDef:
        """Return a class of a module."""
        for node in self.module(module).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        raise AssertionError(f"SGLang {self.version} has no {module}.{name}")

    def methods(self, module: str, name: str) -> dict[str, Function]:
        """Return the methods of a class, without those of its bases."""
        return {node.name: node for node in self.cls(module, name).body if isinstance(node, Function)}

    def fields(self, module: str, name: str) -> set[str]:
        """Return the fields of a dataclass or struct, or what ``__init__`` of a plain class takes."""
        cls = self.cls(module, name)
        found = {node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and _is_name(node.target)}
        if (init := self.methods(module, name).get("__init__")) is not None:
            found |= parameters(init)
        return found


def parameters(function: Function) -> set[str]:
    """Return the names of a function's parameters."""
    arguments = function.args
    return {argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}


def strings(tree: ast.AST) -> set[str]:
    """Return all strings of a syntax tree."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield all calls of a syntax tree."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)


def _wheel(version: str) -> Path:
    """Return the wheel of a version, which ``make sglang-wheels`` has downloaded."""
    wheels = list(FOLDER.glob(f"sglang-{version}-*.whl"))
    if not wheels:
        pytest.fail(f"the wheel of sglang {version} is not in {FOLDER}: run make sglang-wheels, or set {VARIABLE}.")
    return wheels[0]
