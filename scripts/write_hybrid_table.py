"""Writes the table of families in plugins/hybrids/README.md: which layers of each have a state, and what was tested.

``python scripts/write_hybrid_table.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when
the table is not what the tests' models say.
"""

from __future__ import annotations

import sys
from typing import Final

import torch
from distributions import ROOT
from transformers import AutoModelForCausalLM
from written_files import with_table, write_or_check

sys.path.insert(0, str(ROOT / "plugins" / "hybrids" / "tests"))
from hybrid_models import FAMILIES, REFUSED, config_of
from rlplug_hybrids.layers import kernels_of, stateful_layers

PAGE: Final = ROOT / "plugins" / "hybrids" / "README.md"
BEGIN: Final = "<!-- Written by scripts/write_hybrid_table.py from tests/hybrid_models.py: run `make docs`. -->"


def row(family: str) -> str:
    """Return the table's row of a family: its layers with a state, the functions with kernels, what tests say."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family))
    classes = {type(layer) for layer in stateful_layers(model).values()}
    layers = ", ".join(f"`{each.__name__}`" for each in sorted(classes, key=lambda each: each.__name__)) or "none"
    packages = ", ".join(sorted({f"`{kernel.package}`" for each in classes for kernel in kernels_of(each)})) or "none"
    result = f"refused: {REFUSED[family][1]}" if family in REFUSED else "equal to each row alone"
    return f"| `{family}` | {layers} | {packages if classes else ''} | {result} |"


def table() -> str:
    """Return a Markdown table with a row for each family."""
    head = "| model type | layers with a state | packages of their kernels | packed rows |\n|---|---|---|---|"
    return "\n".join([head, *map(row, FAMILIES)])


def main() -> int:
    return write_or_check(__doc__, PAGE, lambda page: with_table(page, BEGIN, table()))


if __name__ == "__main__":
    sys.exit(main())
