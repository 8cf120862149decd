"""Writes the keys of the core's options by their block into keys.json, which is read before slow imports.

``python scripts/write_keys.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when the file
is not what the parser has.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Final

from distributions import ROOT
from rlplug_devkit.completion import options_of
from written_files import write_or_check

KEYS: Final = ROOT / "rlplug" / "cli" / "configuration" / "keys.json"
SECTIONS: Final = ("model", "data", "run", "checkpoint", "profile")


def make_keys(_: str) -> str:
    """Return the names in each block, by the block's key."""
    blocks: dict[str, set[str]] = defaultdict(set)
    for option in options_of("fit"):
        block, _, name = option.removeprefix("--").rpartition(".")
        if block.split(".")[0] in SECTIONS and name != "help" and not name.endswith("+"):
            blocks[block].add(name)
    for block in list(blocks):
        outer, _, name = block.rpartition(".")
        if outer:
            blocks[outer].add(name)
    return json.dumps({block: sorted(names) for block, names in sorted(blocks.items())}, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, KEYS, make_keys))
