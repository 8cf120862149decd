"""The checks of a kit on one mutant: in pytest's order, with all their arguments, until the first that fails."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from rlplug_devkit.claims import NOT_COMPARED


def first_failure(
    checks: Any,
    given: Mapping[str, Any] = MappingProxyType({}),
    first: Sequence[str] = (),
    never: Sequence[str] = (),
    applies: Callable[[Any], bool] = lambda check: True,
    around: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ignored: type[Exception] | tuple[type[Exception], ...] = (),
) -> str | None:
    """Return the first check of a test class that fails, or ``None``.

    Args:
        checks: The class.
        given: What fixtures would give the checks, by name.
        first: Checks that run before all others.
        never: Checks that do not run, besides those that the class is excused from.
        applies: Whether a check applies.
        around: Surrounds the call of a check, whose name it gets.
        ignored: Errors of a check that has nothing to compare yet.
    """
    found = dict.fromkeys(name for name in first if hasattr(checks, name))
    for base in reversed(checks.__mro__):
        found |= dict.fromkeys(name for name in vars(base) if name.startswith("test_"))
    for name in [each for each in found if each not in never and each not in checks.excused]:
        check = getattr(checks, name)
        for arguments in _arguments(check, given) if applies(check) else ():
            try:
                with around(name):
                    getattr(checks(), name)(**arguments)
            except ignored:
                continue
            except pytest.skip.Exception as skip:
                if str(skip).startswith(NOT_COMPARED):  # nothing has failed before, so nothing excuses it
                    return name
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - each kills the mutant
                return name
    return None


def _arguments(check: Any, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each call of a check: what is given, and each value of its parameters."""
    wanted = {name: given[name] for name in inspect.signature(check).parameters if name in given}
    marks = [mark for mark in getattr(check, "pytestmark", []) if mark.name == "parametrize"]
    for chosen in itertools.product(*(mark.args[1] for mark in marks)):
        arguments = dict(wanted)
        for mark, value in zip(marks, chosen, strict=True):
            named = mark.args[0]
            names = [name.strip() for name in named.split(",")] if isinstance(named, str) else list(named)
            values = value.values if hasattr(value, "marks") else value if len(names) > 1 else [value]
            arguments |= dict(zip(names, values, strict=True))
        yield arguments
