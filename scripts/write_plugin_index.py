"""Writes rlplug/plugin_index.json: which distribution of this repository brings which class, for error messages.

``python scripts/write_plugin_index.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when
the file is not what the plugins under ``plugins/`` register. They have to be installed.
"""

from __future__ import annotations

import json
import sys
from typing import Final

from distributions import ROOT, plugin_distributions
from written_files import write_or_check

from rlplug.plugin_manager import plugins

INDEX: Final = ROOT / "rlplug" / "plugin_index.json"


def index() -> str:
    """Return the file's text: the names of the classes that each distribution registers.

    Raises:
        SystemExit: A plugin of the repository is not installed, or registers no class.
    """
    registered = plugins().registry.by_distribution()
    names: dict[str, list[str]] = {}
    for distribution in plugin_distributions():
        if distribution.name not in registered:
            raise SystemExit(
                f"{distribution.name} registers no class here: install it, pip install --editable {distribution.folder}"
            )
        names[distribution.name] = sorted(r.name for r in registered[distribution.name])
    return json.dumps(dict(sorted(names.items())), indent=2) + "\n"


def main() -> int:
    return write_or_check(__doc__, INDEX, lambda _: index())


if __name__ == "__main__":
    sys.exit(main())
