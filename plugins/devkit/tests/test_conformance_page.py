"""The numbers of docs/conformance.md are those of the tables that the tests of the kits have."""

from __future__ import annotations

import re
from pathlib import Path

import test_algorithm_sabotage
import test_hook_sabotage
import test_optimization_sabotage
import test_task_sabotage
import test_trainer_sabotage

PAGE = Path(__file__).parents[3] / "docs/conformance.md"


def test_the_page_has_the_numbers_of_the_tables() -> None:
    tables = {
        "algorithm": (test_algorithm_sabotage.CAUGHT_BY, test_algorithm_sabotage.MISSED),
        "optimization": (test_optimization_sabotage.CAUGHT_BY, test_optimization_sabotage.MISSED),
        "hooks": (test_hook_sabotage.CAUGHT_BY, test_hook_sabotage.MISSED),
        "reward": (test_task_sabotage.CAUGHT_BY["reward"], ()),
        "environment": (test_task_sabotage.CAUGHT_BY["environment"], ()),
        "data source": (test_task_sabotage.CAUGHT_BY["source"], ()),
        "trainer": ([name for names in test_trainer_sabotage.CAUGHT_BY.values() for name in names], ()),
    }
    expected = {
        kind: (len(caught) + len(missed), len(caught), len(missed)) for kind, (caught, missed) in tables.items()
    }
    rows = re.findall(r"^\| ([\w ]+) \| (\d+) \| (\d+) \|[^|]*\| (\d+) \|$", PAGE.read_text(), re.M)
    assert {kind: tuple(map(int, numbers)) for kind, *numbers in rows if kind in expected} == expected
