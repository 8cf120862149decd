"""Writes the table in docs/trainers.md: what each trainer claims.

``python scripts/write_trainer_table.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when
the table is not what the classes' ``claims`` say.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from distributions import ROOT, all_distributions
from written_files import with_table, write_or_check

from rlplug.interfaces import TrainerClaims
from rlplug.plugin_manager import plugins

PAGE: Final = ROOT / "docs" / "trainers.md"
BEGIN: Final = (
    "<!-- Written by scripts/write_trainer_table.py: change the claims of the classes, then run `make docs`. -->"
)
AXES: Final = ("replicate", "sequence", "tensor")


def claims() -> Mapping[str, TrainerClaims]:
    """Return the claims of this repository's trainers, by class name; other plugins may be installed."""
    own = [r for d in all_distributions() for r in plugins().registry.by_distribution().get(d.name, ())]
    return {r.name: r.factory.claims for r in own if r.kind == "trainers"}  # type: ignore[attr-defined]


def table(by_name: Mapping[str, TrainerClaims]) -> str:
    """Return a Markdown table with a column for each trainer."""

    def names(values: frozenset[str] | None) -> str:
        return "all" if values is None else ", ".join(f"`{value}`" for value in sorted(values)) or "none"

    rows = {"mesh axis `shard` (FSDP2)": ["yes"] * len(by_name)}
    rows |= {f"mesh axis `{axis}`": ["yes" if axis in c.axes else "no" for c in by_name.values()] for axis in AXES}
    rows["critic"] = ["yes" if c.critic else "no" for c in by_name.values()]
    rows["[`router_replay`](the-step.md#router-replay)"] = [
        "yes" if c.router_replay else "no" for c in by_name.values()
    ]
    rows["[`lora`](lora.md)"] = ["yes" if c.lora else "no" for c in by_name.values()]
    rows["`attn_implementation`"] = [names(c.attention) for c in by_name.values()]
    rows["optimizations"] = [names(c.optimizations) for c in by_name.values()]
    head = f"| | {' | '.join(f'`{name}`' for name in by_name)} |\n|---|{'---|' * len(by_name)}"
    return "\n".join([head, *(f"| {what} | {' | '.join(cells)} |" for what, cells in rows.items())])


def main() -> int:
    return write_or_check(__doc__, PAGE, lambda page: with_table(page, BEGIN, table(claims())))


if __name__ == "__main__":
    sys.exit(main())
