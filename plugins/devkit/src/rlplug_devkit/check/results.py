"""Outcomes of checks: a pytest plugin that writes each as a line, and what is read from the lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import pytest

from rlplug_devkit.claims import DOES_NOT_APPLY, ConformanceReport

RESULTS: Final = "RLPLUG_CHECK_RESULTS"
"""Environment variable with the file of lines."""
SHARE: Final = "RLPLUG_CHECK_SHARE"
"""Environment variable with the number of this process, and of how many, which share the checks of engines."""
Held: TypeAlias = Literal["held", "failed", "does not apply", "skipped", ""]
"""``skipped`` by the author, and empty for a check that has begun."""
WORST_FIRST: Final[Sequence[Held]] = ("failed", "skipped", "held", "does not apply")


@dataclass(frozen=True)
class Result:
    """A check of a subject, over all its parameters."""

    subject: str
    check: str
    held: Held
    seconds: float
    reason: str = ""


class Recorder:
    """Pytest plugin that appends a JSON line for each check that ends, and one for each that begins."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "", 0.0, "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        held: Held = "held" if report.passed else "failed"
        if report.skipped:
            held = "does not apply" if reason.startswith(DOES_NOT_APPLY) else "skipped"
        self._write(report.nodeid, held, report.duration, reason if report.skipped else _last_error(report))

    def _write(self, nodeid: str, held: Held, seconds: float, reason: str) -> None:
        names = nodeid.partition("[")[0].split("::")
        line = {"subject": names[-2] if len(names) > 1 else "", "check": names[-1]}
        with self._file.open("a") as file:
            file.write(json.dumps({**line, "held": held, "seconds": seconds, "reason": reason}) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder, where pytest runs with ``-p rlplug_devkit.check.results``."""
    config.pluginmanager.register(Recorder(Path(os.environ[RESULTS])), "rlplug-check-recorder")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End the process where a call may never end: Python would wait for the threads of a plugin's own pool."""
    report: Any = session.config.pluginmanager.get_plugin(ConformanceReport.NAME)
    if report is not None and report.has_late:
        os._exit(exitstatus)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep this process's share of the checks of engines: neighbours, which take about as long, go to different."""
    from rlplug_devkit.engines.conformance import EngineConformance  # pytest rewrites the kits' asserts before

    number, processes = map(int, os.environ.get(SHARE, "0 1").split())
    checks = {item: item.nodeid.partition("[")[0] for item in items if issubclass(_class_of(item), EngineConformance)}
    places = {check: place for place, check in enumerate(dict.fromkeys(checks.values()))}
    items[:] = [item for item in items if item not in checks or places[checks[item]] % processes == number]


def _class_of(item: pytest.Item) -> type:
    return getattr(item, "cls", None) or type(None)


def _last_error(report: pytest.TestReport) -> str:
    """Return the message of a failure: the lines that pytest marks with E, or the end of its text."""
    if not report.failed:
        return ""
    lines = report.longreprtext.splitlines()
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return " ".join(marked or lines[-3:])[:2000]


def read_results(lines: Iterable[str]) -> tuple[list[Result], Result | None]:
    """Return results of a file's lines, one a check, in their order, and the check that has begun and not ended."""
    found: dict[tuple[str, str], list[Result]] = {}
    begun: Result | None = None
    for line in lines:
        result = Result(**json.loads(line))
        begun = None if result.held else result
        if result.held:
            found.setdefault((result.subject, result.check), []).append(result)
    return [_together(results) for results in found.values()], begun


def _together(results: Sequence[Result]) -> Result:
    """Return the worst of a check's outcomes, with the seconds of all."""
    worst = min(results, key=lambda result: WORST_FIRST.index(result.held))
    return Result(worst.subject, worst.check, worst.held, sum(result.seconds for result in results), worst.reason)
