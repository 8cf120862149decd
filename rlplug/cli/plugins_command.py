"""``rlplug plugins``: what is installed, read from the metadata of distributions; with ``--check``, what loads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Final

from rlplug.observability.terminal import make_grid, say, show
from rlplug.plugin_checks import PluginRecord, blocked_names, find_plugins, record_of

STYLES: Final = {"loaded": "green", "blocked": "yellow", "failed": "red", "installed": "cyan"}


def plugins_command(arguments: Sequence[str], blocked: Sequence[str]) -> bool:
    """Print the plugins; return whether none failed.

    Args:
        arguments: Those after the command's name.
        blocked: Names given with ``--block``.

    Raises:
        ConfigError: No plugin has a blocked name.
    """
    parser = argparse.ArgumentParser("rlplug plugins", description="Show the installed plugins.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="import each plugin, as a run does, and show what fails")
    parser.add_argument("--json", action="store_true", help="print the records as JSON, for machines")
    options = parser.parse_args(arguments)
    if options.check:
        from rlplug.plugin_manager import PluginManager

        records = PluginManager(blocked, strict=False).records
    else:
        records = installed(blocked)
    if options.json:
        print(json.dumps([vars(record) for record in records], indent=2))
    else:
        _print(records, is_checked=options.check)
    return all(record.state != "failed" for record in records)


def installed(blocked: Iterable[str]) -> list[PluginRecord]:
    """Return a record of each installed plugin, without importing it.

    Raises:
        ConfigError: No plugin has a blocked name.
    """
    names = blocked_names(blocked)
    published = json.loads(resources.files("rlplug").joinpath("plugin_index.json").read_text())
    records = [record_of(entry_point) for entry_point in find_plugins(names)]
    for record in records:
        is_blocked = bool({record.name, record.distribution} & set(names))
        record.state, record.reason = ("blocked", "by name") if is_blocked else ("installed", "")
        record.registers = [] if is_blocked else published.get(record.distribution, [])
    return records


def _print(records: Sequence[PluginRecord], is_checked: bool) -> None:
    for record in records:
        _print_plugin(record)
    if not {record.distribution for record in records} - {"rlplug"}:
        published = json.loads(resources.files("rlplug").joinpath("plugin_index.json").read_text())
        say(f"no plugins are installed: pip install one of {', '.join(sorted(published))}")
    elif not is_checked:
        say("Nothing was imported: rlplug plugins --check imports each one, and shows what fails.")


def _print_plugin(record: PluginRecord) -> None:
    """Print one plugin as a block whose lines wrap, so that a narrow terminal cuts nothing."""
    api = f", hook API {record.api_range}" if record.api_range else ""
    say(
        (record.name, "bold"),
        " ",
        (record.state, STYLES[record.state]),
        f" ({record.distribution} {record.version}{api})",
    )
    rows: dict[str, list[str]] = {}
    for registered in record.registers:
        kind, _, name = registered.rpartition("/")
        rows.setdefault(kind or "classes", []).append(name)
    if record.hooks:
        rows["hooks"] = [name.removeprefix("rlplug_") for name in record.hooks]
    if record.state == "failed":
        say(f"  file  {record.file or 'not found'}")
        rows = {"reason": [record.reason]}
    if rows:
        show(make_grid((f"  {label}", ", ".join(values)) for label, values in rows.items()))
