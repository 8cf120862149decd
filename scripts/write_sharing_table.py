"""Writes the table of what shared prefixes are combined with in plugins/optims/README.md, from the tests' runs.

``python scripts/write_sharing_table.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when
the table is not what the tests run.
"""

from __future__ import annotations

import sys
from typing import Final

from distributions import ROOT
from written_files import with_table, write_or_check

sys.path.insert(0, str(ROOT / "tests" / "integration"))
from shared_prefix_cases import COMBINATIONS, ELSEWHERE

PAGE: Final = ROOT / "plugins" / "optims" / "README.md"
BEGIN: Final = "<!-- Written by scripts/write_sharing_table.py from tests/integration: run `make docs`. -->"
RUNS: Final = "tests/integration/test_shared_prefix_runs.py"


def link(test: str) -> str:
    """Return a link to a test, ``file::name``.

    Raises:
        SystemExit: There is none of that name.
    """
    file, _, name = test.partition("::")
    if f"def {name.partition('[')[0]}(" not in (ROOT / file).read_text():
        raise SystemExit(f"{file} has no test {name}")
    return f"[`{name}`](../../{file})"


def table() -> str:
    """Return a Markdown table with a row for each combination."""
    head = "| with | a group's prompt | test |\n|---|---|---|"
    rows = [
        f"| {each.what} | {'for each: the run says why' if each.why_not else 'once'} | "
        f"{link(f'{RUNS}::test_steps_are_those_of_a_prompt_each[{name}]')} |"
        for name, each in COMBINATIONS.items()
    ]
    return "\n".join([head, *rows, *(f"| {what} | {result} | {link(test)} |" for what, result, test in ELSEWHERE)])


def main() -> int:
    return write_or_check(__doc__, PAGE, lambda page: with_table(page, BEGIN, table()))


if __name__ == "__main__":
    sys.exit(main())
