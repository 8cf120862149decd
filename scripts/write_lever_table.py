"""Writes the table in docs/tuning.md: what options saved of a phase, where it was measured.

``python scripts/write_lever_table.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when
the table is not what the code says.
"""

from __future__ import annotations

import sys
from typing import Final

from distributions import ROOT
from rlplug_watch.levers import LEVERS
from written_files import with_table, write_or_check

PAGE: Final = ROOT / "docs" / "tuning.md"
BEGIN: Final = "<!-- Written by scripts/write_lever_table.py: change levers.py, then run `make docs`. -->"


def table() -> str:
    """Return the table."""
    rows = ["| phase | change | key | saved | measured |", "|---|---|---|---|---|"]
    for lever in LEVERS:
        where, _, folder = lever.measured.rpartition(": ")
        cells = [
            f"`{lever.phase}`",
            f"[{lever.what}]({lever.page})",
            f"`{lever.key}`",
            f"{lever.saved:.0%}",
            f"[{where}](../benchmarks/results/{folder}/README.md)",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    return write_or_check(__doc__, PAGE, lambda page: with_table(page, BEGIN, table()))


if __name__ == "__main__":
    sys.exit(main())
