"""Claims of an engine or trainer, the checks of each claim, and their report at the end of a pytest run."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

import pytest

from rlplug.errors import describe
from rlplug.interfaces.rollout import EngineCapabilities
from rlplug_devkit.kit import EXCUSED
from rlplug_devkit.process_guard import ProcessGuard

Check = TypeVar("Check", bound=Callable[..., None])

EVERY_ENGINE = "every engine"
DOES_NOT_APPLY = "does not apply: "
NOT_COMPARED: Final = "not compared: "
"""How a check's skip begins that an earlier failure of the same plugin excuses, and nothing else."""
STARTS_ONCE: Final = "starts once in a process"
"""In the reason of a check that wants another engine than the one that its process had."""


@dataclass(frozen=True)
class Claim:
    """Capability that a check is about, and whether it applies to engines that claim it or to those that do not."""

    capability: str
    is_claimed: bool = True

    def fits(self, capabilities: EngineCapabilities) -> bool:
        """Return whether the check applies to an engine with these capabilities."""
        return self.capability == EVERY_ENGINE or getattr(capabilities, self.capability) == self.is_claimed


def applies_to(capability: str, is_claimed: bool = True) -> Callable[[Check], Check]:
    """Return a decorator of checks for engines that claim ``capability``, or for those that do not."""
    assert capability in {f.name for f in fields(EngineCapabilities)}, capability

    def mark(check: Check) -> Check:
        check.__dict__["claim"] = Claim(capability, is_claimed)
        return check

    return mark


def engine_claims(capabilities: EngineCapabilities) -> dict[str, bool | None]:
    """Return what an engine claims, by the name of the capability."""
    named: dict[str, bool | None] = {f.name: getattr(capabilities, f.name) for f in fields(EngineCapabilities)}
    return {EVERY_ENGINE: None} | named


def claim_of(check: Callable[..., None]) -> Claim:
    """Return the claim that a check is about."""
    claim: Claim = check.__dict__.get("claim", Claim(EVERY_ENGINE))
    return claim


@dataclass
class Tally:
    """Outcomes of the checks of an engine or trainer."""

    subject: str
    """Name of its class."""
    claims: Mapping[str, bool | None]
    """Whether it claims each capability; ``None`` for what is asked of all."""
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of checks that ``passed``, ``failed``, were ``skipped`` or ``not applied``, by capability."""
    checks: dict[str, list[str]] = field(default_factory=dict)
    """Names of the checks that passed, by capability, without their parameters."""
    reasons: dict[str, list[str]] = field(default_factory=dict)
    """Checks that were skipped although they apply, each with the reason, by capability."""

    def lines(self) -> list[str]:
        """Return a line per capability, and one per check that was skipped although it applies."""
        return [line for name in self.claims for line in self._lines_of(name)]

    def _lines_of(self, name: str) -> list[str]:
        outcomes = self.outcomes.get(name, Counter())
        kinds = ("passed", "failed", "skipped", "not applied")
        counts = ", ".join(f"{outcomes[kind]} {kind}" for kind in kinds if outcomes[kind])
        claim = {None: "", True: "claimed", False: "not claimed"}[self.claims[name]]
        line = f"  {name:<16}  {claim:<11}  {counts or 'not checked by this kit'}".rstrip()
        tested_by = ", ".join(self.checks.get(name, []))
        by = textwrap.wrap(f"by {tested_by}", 110, initial_indent="    ", subsequent_indent="       ")
        return [line, *(by if tested_by else []), *(f"    skipped {reason}" for reason in self.reasons.get(name, []))]


class ConformanceReport:
    """Pytest plugin that the first check registers, and that writes the terminal summary."""

    NAME = "rlplug-conformance"

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}
        self._failed: set[str] = set()
        """Test classes of which a check failed."""
        self.has_late = False
        """Whether a call of a plugin was late, and may never end."""

    @staticmethod
    def of(config: pytest.Config) -> ConformanceReport:
        """Return this run's report."""
        report: Any = config.pluginmanager.get_plugin(ConformanceReport.NAME)
        if report is None:
            report = ConformanceReport()
            config.pluginmanager.register(report, ConformanceReport.NAME)
        assert isinstance(report, ConformanceReport)
        return report

    def include(self, tests: str, subject: str, claims: Mapping[str, bool | None]) -> None:
        """Open a tally for a test class; see :class:`Tally` for the arguments."""
        self._tallies.setdefault(tests, Tally(subject, claims))

    def has_failure(self, tests: str) -> bool:
        """Return whether a check of a test class has failed so far."""
        return tests in self._failed

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """Run a check of a kit, unless its class is excused from it, within the guard of its class, if it has one."""
        excuse = getattr(pyfuncitem.cls, "excused", {}).get(pyfuncitem.originalname)
        if excuse is not None:
            pytest.skip(f"{EXCUSED}{excuse}")
        guard = getattr(pyfuncitem.cls, "guard", None)
        is_of_kit = pyfuncitem.function.__module__.startswith("rlplug_devkit.")
        if not (is_of_kit and isinstance(guard, ProcessGuard)):
            return (yield)
        with guard.around(words_of(pyfuncitem.originalname)):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Fail a check that compared nothing although nothing has failed before."""
        report = yield
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        if report.skipped and reason.startswith(NOT_COMPARED) and _tests_of(item.nodeid) not in self._failed:
            assert call.excinfo is not None
            cause = call.excinfo.value.__context__
            report.outcome = "failed"
            report.longrepr = (
                f"{item.name} could not compare anything{'' if cause is None else f': {describe(cause)}'}. No check "
                "before it failed, so nothing excuses that: only what a plugin does not claim is left unchecked."
            )
        return report

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(_tests_of(report.nodeid))
        claims = [value for name, value in report.user_properties if name == "rlplug_claim"]
        if not claims or not (report.when == "call" or report.skipped or report.failed):
            return
        tests, _, check = report.nodeid.rpartition("::")
        (capability,) = claims
        tally, outcome = self._tallies[tests], str(report.outcome)
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if reason.startswith(DOES_NOT_APPLY):
                outcome = "not applied"
            else:
                tally.reasons.setdefault(str(capability), []).append(f"{check}: {reason}")
        tally.outcomes.setdefault(str(capability), Counter())[outcome] += 1
        if outcome == "passed":
            words = words_of(check)
            passed = tally.checks.setdefault(str(capability), [])
            passed += [] if words in passed else [words]

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for tests, tally in self._tallies.items():
            terminalreporter.section(f"conformance of {tally.subject}")
            terminalreporter.write_line(f"  {tests}")
            for line in tally.lines():
                terminalreporter.write_line(line)


def _tests_of(nodeid: str) -> str:
    """Return the id of a check's class."""
    return nodeid.partition("[")[0].rpartition("::")[0]


def words_of(check: str) -> str:
    """Return a check's name as words, without its parameters."""
    return check.partition("[")[0].removeprefix("test_").replace("_", " ")
