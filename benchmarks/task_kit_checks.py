"""What the subjects of ``task_kit_mutants`` share: a subject, and its test class of a kit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Subject:
    """A plugin class, and what it calls, whose mutants are made."""

    name: str
    parts: Mapping[str, tuple[str, ...]]
    """Classes, functions and tables by module, those first that others use."""
    checks: Callable[[Mapping[str, Any]], type]
    """Makes the test class, of the classes and functions by name."""


def kit(base: type, deadline_s: float = 30.0, **answers: Any) -> type:
    """Return a test class whose methods return what is given, or what a function of no argument returns."""
    methods = {
        name: value
        if isinstance(value, int) or name == "defaults"
        else lambda self, value=value: value() if callable(value) else value
        for name, value in answers.items()
    }
    return type("Checks", (base,), {"deadline_s": deadline_s, "num_rows": 50, "most_rows": 1000, **methods})
