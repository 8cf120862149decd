"""Writes rlplug/plugin_index.json: which distribution of this repository brings which class, command and module.

Error messages read it. ``python scripts/write_plugin_index.py`` (or ``make docs``) writes it; ``--check`` writes
nothing and exits with 1 when the file is not what the plugins under ``plugins/`` bring. They have to be installed.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

from distributions import ROOT, plugin_distributions
from written_files import write_or_check

from rlplug.plugin_checks import REGISTRATION_PREFIX
from rlplug.plugin_manager import plugins

INDEX: Final = ROOT / "rlplug" / "plugin_index.json"


def index() -> str:
    """Return the file's text.

    Raises:
        SystemExit: A plugin of the repository is not installed.
    """
    manager = plugins()
    found: dict[str, Any] = {}
    for distribution in plugin_distributions():
        if not {*distribution.plugins} <= {record.name for record in manager.records}:
            raise SystemExit(f"install {distribution.name}: pip install --editable {distribution.folder}")
        registered = manager.registry.by_distribution().get(distribution.name, [])
        found[distribution.name] = {
            "classes": sorted(r.name for r in registered),
            "commands": distribution.commands,
            "hooks": sorted(
                {
                    hook
                    for record in manager.records
                    if record.distribution == distribution.name
                    for hook in record.hooks
                    if not hook.startswith(REGISTRATION_PREFIX)
                }
            ),
        }
    return json.dumps(dict(sorted(found.items())), indent=2) + "\n"


def main() -> int:
    return write_or_check(__doc__, INDEX, lambda _: index())


if __name__ == "__main__":
    sys.exit(main())
