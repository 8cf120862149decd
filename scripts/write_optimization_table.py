"""Writes the table in docs/optimizations.md from the classes: what each saves and costs, where it goes, and with what.

``python scripts/write_optimization_table.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1
when the table is not what the code says.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any, Final

from distributions import ROOT, all_distributions
from written_files import with_table, write_or_check

from rlplug.plugin_manager import plugins

PAGE: Final = ROOT / "docs" / "optimizations.md"
BEGIN: Final = "<!-- Written by scripts/write_optimization_table.py: change the docstrings, then run `make docs`. -->"
HEADER: Final = "| name | saves | costs | networks | not with |\n|---|---|---|---|---|"


def table() -> str:
    """Return the table."""
    registered = plugins().registry.by_distribution()
    own = [r for distribution in all_distributions() for r in registered.get(distribution.name, ())]
    classes: dict[str, Any] = {r.name: r.factory for r in own if r.kind == "optimizations"}
    pairs = {(name, other) for name, optimization in classes.items() for other in optimization.conflicts}
    return "\n".join([HEADER, *(_row(classes[name], pairs) for name in sorted(classes))])


def _row(optimization: Any, pairs: set[tuple[str, str]]) -> str:
    name = optimization.__name__
    others = [f"`{other}`" for other in sorted({b if a == name else a for a, b in pairs if name in (a, b)})]
    file = Path(inspect.getfile(optimization)).resolve().relative_to(ROOT)
    cells = [f"[`{name}`](../{file})", _said(optimization, "Saves"), _said(optimization, "Costs")]
    return f"| {' | '.join([*cells, ', '.join(optimization.applies_to), ', '.join(others)])} |"


def _said(optimization: Any, word: str) -> str:
    """Return what the docstring says after ``Saves:`` or ``Costs:``, up to the next such word, in Markdown."""
    lines = re.search(rf"^{word}: (.*?)(?=^\w+: |^$)", inspect.getdoc(optimization) or "", re.M | re.S)
    if lines is None:
        raise SystemExit(f"the docstring of {optimization.__name__} does not say {word!r}")
    return " ".join(lines[1].split()).removesuffix(".").replace("``", "`").replace("|", "\\|")


def main() -> int:
    return write_or_check(__doc__, PAGE, lambda page: with_table(page, BEGIN, table()))


if __name__ == "__main__":
    sys.exit(main())
