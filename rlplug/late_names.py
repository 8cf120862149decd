"""Names of a package that are imported at their first use, so that importing the package imports nothing (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def late_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    A type checker reads the same names from imports under ``TYPE_CHECKING``.

    Args:
        package: Its ``__name__``.
        modules: Module inside the package by name.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get
