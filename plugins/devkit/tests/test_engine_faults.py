"""Engines with one fault each: the check that is for it is the first to fail, and says what is wrong.

``docs/conformance.md`` has the numbers. On a push, one fault of each kind; every night all of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from faulty_engines import FAULTS
from nested_pytest import Outcomes, run_checks

HERE = Path(__file__).parent
ENGINES = HERE / "faulty_engines.py"
PAGE = HERE.parents[2] / "docs" / "conformance.md"
ON_A_PUSH = ("AnswersInReverse", "IgnoresLimitsOfRequests", "AddsNoise", "SetsVariables")
"""Faults that an early check finds, and that were once reported as padding or not at all."""


@pytest.fixture(scope="module")
def sample() -> Outcomes:
    return run_checks([f"{ENGINES}::Test{name}" for name in ON_A_PUSH], stops_at_first=True)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_checks([ENGINES], stops_at_first=True)


@pytest.mark.kit
@pytest.mark.parametrize("name", ON_A_PUSH)
def test_a_sample_of_faults_is_named(sample: Outcomes, name: str) -> None:
    assert_named(sample, name)


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # the first of them runs all checks of all engines
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_by_the_first_check_that_fails(outcomes: Outcomes, name: str) -> None:
    assert_named(outcomes, name)


def assert_named(outcomes: Outcomes, name: str) -> None:
    """Fail unless the first failed check of an engine is the one in the table."""
    fault = FAULTS[name]
    failed = [check for of, check in outcomes.messages if of == f"Test{name}"]
    found = failed[0].partition("[")[0] if failed else None
    assert found == fault.caught_by, outcomes.messages.get((f"Test{name}", failed[0])) if failed else outcomes.output
    if failed and fault.says:
        assert fault.says in re.sub(r"\s+", " ", outcomes.messages[f"Test{name}", failed[0]])


def test_page_has_the_numbers_of_the_table() -> None:
    """Would catch a table that grows without the page, and a miss that the page does not name."""
    section = PAGE.read_text().partition("## Engines")[2].partition("\n## ")[0]
    kinds = sorted({fault.kind for fault in FAULTS.values()})
    for kind in kinds:
        of_kind = [fault for fault in FAULTS.values() if fault.kind == kind]
        caught = sum(fault.caught_by is not None for fault in of_kind)
        assert re.search(rf"^\| {kind} \| {len(of_kind)} \| {caught} \|", section, re.M), (kind, len(of_kind), caught)
    for name, fault in FAULTS.items():
        assert fault.caught_by is not None or f"`{name}`" in section, name
