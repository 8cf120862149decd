"""No test class drops a check of its kit in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nested_pytest import run_checks
from rlplug_devkit import RewardConformance
from rlplug_devkit.kit import checks_of, marked

CHECK = "test_notes_are_texts"
EXCUSED = """
from simple_rewards import Fine, RewardChecks


class TestExcused(RewardChecks):
    reward = Fine
    excused = {"test_notes_are_texts": "they are numbers"}
"""


class _Passes:
    def test_notes_are_texts(self) -> None:
        """In front of the kit, as a mixin."""


@pytest.mark.parametrize(
    ("bases", "body", "says"),
    [
        ((), {CHECK: None}, f"replaces the kit's check {CHECK}"),
        ((), {CHECK: lambda self: pytest.skip("no")}, f"replaces the kit's check {CHECK}"),
        ((_Passes,), {}, f"replaces the kit's check {CHECK}"),
        ((), {"excused": {CHECK: " "}}, "give a check of the kit, and a reason"),
        ((), {"excused": {"test_gone": "why"}}, "give a check of the kit, and a reason"),
    ],
)
def test_a_class_that_drops_a_check_is_refused(bases: tuple[type, ...], body: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        type("TestMine", (*bases, RewardConformance), body)


def test_marks_are_no_replacement() -> None:
    check = marked(RewardConformance.test_notes_are_texts, pytest.mark.nightly)
    made = type("TestMine", (RewardConformance,), {CHECK: check})
    assert [mark.name for mark in check.pytestmark] == ["nightly"]  # type: ignore[attr-defined]
    assert not hasattr(RewardConformance.test_notes_are_texts, "pytestmark")
    assert checks_of(made).keys() == checks_of(RewardConformance).keys()


def test_an_excuse_is_told(tmp_path: Path) -> None:
    """Alone catches an excuse that counts as held, and one that is not read."""
    file = tmp_path / "checks_of_one.py"
    file.write_text(EXCUSED)
    outcomes = run_checks([f"{file}::TestExcused::{CHECK}"])
    assert (outcomes.passed, outcomes.failed) == (set(), set())
    assert f"skipped {CHECK}: excused by its author: they are numbers" in outcomes.output
