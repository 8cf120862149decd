"""Writes docs/api/certified.md: which engine, trainer and versions are certified, from the records that plugins ship.

``python scripts/write_certified.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when the
page is not what the records say, or a record was changed by hand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, Final

from distributions import ROOT, plugin_distributions
from rlplug_devkit.certify.records import FOLDER, Record, RecordError, read_record
from written_files import write_or_check

PAGE: Final = ROOT / "docs" / "api" / "certified.md"
HEAD: Final = """\
# Certified sets

<!-- Written by scripts/write_certified.py from the records in plugins' packages: run `make docs`. -->

A row is a record of `rlplug certify`: the kits of the engine and the trainer, and for each family of models a learning
run of two steps in which both must agree on every sampled token, before and after a weight sync. Records have a hash
and digests of rlplug's and the plugins' code, ship in the wheels, and are not written by hand. `rlplug plugins --check`
and `rlplug doctor` compare what is installed with them, its code too, and name the nearest certified set as a pip line.
A row without digests is of versions alone. Other versions may work as well: nobody has tried them this way.
Differences are those of logprobs in nats, the largest of all steps; checks of what an engine does not claim were not
applied.

| engine, trainer | families | versions | code | device | held, not applied | mean, largest | seconds | date, owner |
|---|---|---|---|---|---|---|---|---|
"""


def records() -> Iterator[Record]:
    """Yield the records of all distributions of this repository.

    Raises:
        SystemExit: One is refused.
    """
    for distribution in plugin_distributions():
        for file in sorted(distribution.folder.glob(f"src/*/{FOLDER}/*.json")):
            try:
                yield read_record(file, distribution.name)
            except RecordError as error:
                raise SystemExit(str(error)) from error


def row(record: Record) -> str:
    """Return a record as a row of the table."""
    values = record.values
    kits = [result["held"] for result in values["results"] if result["part"].startswith("kit of ")]
    steps: list[dict[str, Any]] = [step for family in values["measured"].values() for step in family.values()]
    mean, largest = (
        max((step.get(f"mismatch/{name}", math.nan) for step in steps), default=math.nan) for name in ("mean", "max")
    )
    packages = {"Python": values["python"], **record.packages}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    green = "" if record.is_green else "**not certified**: "
    cells = (
        f"{green}`{record.engine}`, `{record.trainer}`",
        ", ".join(values["families"]),
        versions,
        ", ".join(f"{name} `{digest[:8]}`" for name, digest in record.code.items()) or "versions alone",
        record.device,
        f"{kits.count('held')}, {kits.count('does not apply')}",
        f"{mean:.1e}, {largest:.1e}",
        f"{values['seconds']:.0f}",
        f"{values['began'][:10]}, `{record.owner}`",
    )
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return the page's text."""
    return HEAD + "".join(f"{row(record)}\n" for record in records())


def main() -> int:
    return write_or_check(__doc__, PAGE, lambda _: page())


if __name__ == "__main__":
    sys.exit(main())
