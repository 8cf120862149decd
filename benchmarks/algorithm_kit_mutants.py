"""Mutants of this repository's own algorithms and optimizations, and how many of them the kits catch.

    python -m benchmarks.algorithm_kit_mutants --kind algorithm --most 60 --out survivors.json

As ``task_kit_mutants``, whose operators it has: each mutant is a class or function with one small change, and the kit
runs on it in this process until the first check that fails. Texts of messages are not changed: no kit reads them.
"""

from __future__ import annotations

from typing import Any, Final

from rlplug_devkit.process_guard import ProcessGuard

from benchmarks.algorithm_kit_subjects import SUBJECTS
from benchmarks.mutant_checks import first_failure
from benchmarks.task_kit_mutants import Site, main

FIRST: Final = ("test_worked_examples_come_out", "test_options_are_taken_or_refused")
"""Checks that find most, and take little time."""
NEVER: Final = ("test_steps_repeat_in_another_process",)
"""Another process would import the module without the change."""


def killed_by(checks: Any) -> str | None:
    """Return the first check that fails, or ``None``."""
    checks.guard = ProcessGuard()
    return first_failure(checks, first=FIRST, never=NEVER, around=checks.guard.around)


def is_of_a_message(site: Site) -> bool:
    """Return whether a text with a space in it is changed, which nothing but a message is."""
    before, _, after = site.text.partition(": ")[2].rpartition(" becomes ")
    return before[:1] in "\"'" and " " in before and after in ("''", "'mutant'") if before else False


if __name__ == "__main__":
    main(__doc__, SUBJECTS, killed_by, lambda site: not is_of_a_message(site))
