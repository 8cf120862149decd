"""Runs checks on sabotaged parts in a pytest inside the tests' own."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass(eq=False)  # pluggy keeps plugins by their hash
class Outcomes:
    """A pytest plugin that keeps which checks of which class passed and failed."""

    passed: set[tuple[str, str]] = field(default_factory=set)
    failed: set[tuple[str, str]] = field(default_factory=set)
    messages: dict[tuple[str, str], str] = field(default_factory=dict)
    """Reports of those that failed."""
    output: str = ""
    order: list[tuple[str, str]] = field(default_factory=list)
    """Those that failed, in the order in which they ran."""
    stops_at_first: bool = False
    """Whether the checks of a class that come after one that failed are skipped."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        tests = item.nodeid.partition("::")[2].partition("::")[0]
        if self.stops_at_first and any(of == tests for of, _ in self.failed):
            pytest.skip("a check of this class failed before")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tests, _, check = report.nodeid.partition("::")[2].partition("::")
        if report.failed:
            self.failed.add((tests, check))
            self.order.append((tests, check))
            self.messages.setdefault((tests, check), report.longreprtext)  # the end of the check may fail too
        elif report.when == "call" and report.passed:
            self.passed.add((tests, check))

    def failed_in_order(self, tests: str) -> list[str]:
        """Return the checks of a class that failed, the first one first."""
        return [check for of, check in self.order if of == tests]


def run_checks(files: Iterable[Path | str], stops_at_first: bool = False) -> Outcomes:
    """Run files, or classes as ``FILE::CLASS``, in a pytest whose signals and dumps leave the outer one alone."""
    outcomes, output = Outcomes(stops_at_first=stops_at_first), io.StringIO()
    options = ["-p", "no:cacheprovider", "-p", "no:timeout", "-p", "no:faulthandler", "--capture=no"]
    options += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
    with contextlib.redirect_stdout(output):
        pytest.main([*options, *map(str, files)], plugins=[outcomes])
    outcomes.output = output.getvalue()
    return outcomes
