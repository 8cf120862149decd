"""Mutants of this repository's own algorithms and optimizations, and how many of them the kits catch.

    python -m benchmarks.algorithm_kit_mutants --kind algorithm --most 60 --out survivors.json

As ``task_kit_mutants``, whose operators it has: each mutant is a class or function with one small change, and the kit
runs on it in this process until the first check that fails. Texts of messages are not changed: no kit reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
from rlplug_devkit.claims import NOT_COMPARED
from rlplug_devkit.process_guard import ProcessGuard

from benchmarks.algorithm_kit_subjects import SUBJECTS
from benchmarks.task_kit_mutants import Site, main

FIRST: Final = ("test_worked_examples_come_out", "test_options_are_taken_or_refused")
"""Checks that find most, and take little time."""
NEVER: Final = ("test_steps_repeat_in_another_process",)
"""Another process would import the module without the change."""


def killed_by(checks: Any) -> str | None:
    """Return the first check that fails, or ``None``."""
    checks.guard = ProcessGuard()
    for name in _methods(checks):
        for arguments in _arguments(getattr(checks, name)):
            try:
                with checks.guard.around(name):
                    getattr(checks(), name)(**arguments)
            except pytest.skip.Exception as skip:
                if str(skip).startswith(NOT_COMPARED):  # nothing has failed before, so nothing excuses it
                    return name
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - each kills the mutant
                return name
    return None


def _methods(checks: Any) -> Sequence[str]:
    """Return the names of the checks, in the order in which pytest runs them but for ``FIRST``."""
    found: dict[str, None] = dict.fromkeys(name for name in FIRST if hasattr(checks, name))
    for base in reversed(checks.__mro__):
        found |= dict.fromkeys(name for name in vars(base) if name.startswith("test_") and name not in NEVER)
    return [name for name in found if name not in checks.excused]


def _arguments(check: Any) -> Iterator[dict[str, Any]]:
    marks = [mark for mark in getattr(check, "pytestmark", []) if mark.name == "parametrize"]
    if not marks:
        yield {}
    for mark in marks:
        yield from ({mark.args[0]: value} for value in mark.args[1])


def is_of_a_message(site: Site) -> bool:
    """Return whether a text with a space in it is changed, which nothing but a message is."""
    before, _, after = site.text.partition(": ")[2].rpartition(" becomes ")
    return before[:1] in "\"'" and " " in before and after in ("''", "'mutant'") if before else False


if __name__ == "__main__":
    main(__doc__, SUBJECTS, killed_by, lambda site: not is_of_a_message(site))
