"""``rlplug plugins``: what is installed, read from the metadata of distributions; with ``--check``, what loads."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlplug.errors import ConfigError, describe
from rlplug.observability.terminal import make_table, say, show
from rlplug.plugin_checks import PluginRecord, find_plugins, record_of
from rlplug.plugin_names import blocked_names, plugin_index

if TYPE_CHECKING:
    from pluggy import HookImpl

STYLES: Final = {"loaded": "green", "blocked": "yellow", "failed": "red", "installed": "cyan"}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("rlplug plugins", description="Show the installed plugins.", allow_abbrev=False)
    parser.add_argument(
        "--check",
        action="store_true",
        help="import each plugin, as a run does, and show what fails, and which engines are certified here",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="import them, and show files, documentation, and who wraps whom in each hook",
    )
    parser.add_argument(
        "--run", type=Path, metavar="RUN", help="show what plugins' hooks cost in a run, such as runs/quickstart/001"
    )
    parser.add_argument("--json", action="store_true", help="print the records as JSON, for machines")
    return parser


def plugins_command(arguments: list[str]) -> int:
    """Show what is installed; --check shows what fails, --run RUN what hooks cost.

    Raises:
        ConfigError: No plugin has a blocked name, or the run has no costs.
    """
    options = make_parser().parse_args(arguments)
    if options.run is not None:
        _show_costs(options.run, options.json)
        return 0
    order: dict[str, list[HookImpl]] = {}
    if options.check or options.verbose:
        from rlplug.plugin_manager import PluginManager

        manager = PluginManager(strict=False)
        records, order = manager.records, manager.call_order()
        note_missing_libraries(records)
    else:
        records = installed()
    if options.json and options.verbose:
        callers = {
            hook: [{"plugin": each.plugin_name, "is_wrapper": bool(each.wrapper)} for each in found]
            for hook, found in order.items()
        }
        shown = [vars(record) | {"docs": docs_url(record.distribution)} for record in records]
        print(json.dumps({"plugins": shown, "hooks": callers}, indent=2))
    elif options.json:
        print(json.dumps([vars(record) for record in records], indent=2))
    else:
        _print(records, is_checked=options.check or options.verbose, is_verbose=options.verbose)
        if options.check:
            _show_certified(records)
        if options.verbose:
            say("hooks, in the order of their calls")
            _show_pairs((hook, sequence_of(callers)) for hook, callers in order.items())
    return 1 if any(record.state == "failed" for record in records) else 0


def _show_certified(plugins: Sequence[PluginRecord]) -> None:
    """Print what records of certifications say of the installed engines and trainers."""
    from rlplug_devkit.certify.installed import verdicts

    found, problems = verdicts()
    for each in found:
        style = "green" if each.is_certified else "yellow"
        say((f"{each.engine} with {each.trainer}", "bold"), " ", (each.text, style), wraps=True)
        if each.advice:
            say(f"  {each.advice}")
    registered = [
        name for plugin in plugins if plugin.state == "loaded" and not plugin.reason for name in plugin.registers
    ]
    engines = {name.removeprefix("rollouts/") for name in registered if name.startswith("rollouts/")}
    for engine in sorted(engines - {each.engine for each in found}):
        say((engine, "bold"), f" has no record: rlplug certify --engine {engine}")
    for problem in problems:
        say(("a record is refused", "red"), f": {problem}", wraps=True)


def installed(blocked: Iterable[str] = ()) -> list[PluginRecord]:
    """Return a record of each installed plugin, without importing it.

    Raises:
        ConfigError: No plugin has a blocked name.
    """
    names = blocked_names(blocked)
    records = [record_of(entry_point) for entry_point in find_plugins(names)]
    for record in records:
        is_blocked = bool({record.name, record.distribution} & set(names))
        record.state, record.reason = ("blocked", "by name") if is_blocked else ("installed", "")
        record.registers = [] if is_blocked else _published(record.distribution)
    return records


def note_missing_libraries(records: Sequence[PluginRecord]) -> None:
    """Give loaded plugins, as their reason, the libraries of their ``RLPLUG_LIBRARIES`` that are not installed."""
    modules = {point.name: sys.modules.get(point.module) for point in find_plugins(())}
    for record in records:
        wanted = getattr(modules.get(record.name), "RLPLUG_LIBRARIES", ())
        missing = [name for name in wanted if importlib.util.find_spec(name) is None]
        if record.state == "loaded" and missing:
            record.reason = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed"


def _published(distribution: str) -> list[str]:
    """Return the classes and commands of a published distribution."""
    found = plugin_index().get(distribution)
    return [] if found is None else [*found["classes"], *(f"rlplug {name}" for name in found["commands"])]


def docs_url(distribution: str) -> str:
    """Return where a distribution says that its documentation is, else its home page; empty where it says neither."""
    urls = {}
    for line in metadata(distribution).get_all("Project-URL") or []:
        label, _, url = line.partition(",")
        urls[label.strip().lower()] = url.strip()
    return next((urls[label] for label in ("documentation", "homepage", "repository", "source") if label in urls), "")


def sequence_of(callers: Sequence[HookImpl]) -> str:
    """Return the plugins of a hook in words: "a around b around rlplug", or "a, b" where nobody wraps."""
    words = [f"{caller.plugin_name}{' around ' if caller.wrapper else ', '}" for caller in callers]
    return "".join(words).removesuffix(", ").removesuffix(" around ")


def _show_costs(run: Path, is_json: bool) -> None:
    """Print what hooks cost in a run.

    Raises:
        ConfigError: It has no ``run.json`` with costs.
    """
    try:
        costs = json.loads((run / "run.json").read_text())["hook_costs"]
        rows = [tuple(str(cost[name]) for name in ("plugin", "hook", "phase", "calls")) for cost in costs]
        rows = [(*row, f"{cost['seconds']:.6f}") for row, cost in zip(rows, costs, strict=True)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"plugins --run {run}: its run.json has no costs of hooks ({describe(error)}).") from error
    if is_json:
        print(json.dumps(costs, indent=2))
        return
    title = "cost by plugin: seconds of the host in hooks, without what a wrapper wraps"
    show(make_table(("plugin", "hook", "phase", "calls", "seconds"), rows, title))


def _print(records: Sequence[PluginRecord], is_checked: bool, is_verbose: bool) -> None:
    for record in records:
        _print_plugin(record, is_verbose)
    if not {record.distribution for record in records} - {"rlplug"}:
        say(f"no plugins are installed: pip install one of {', '.join(sorted(plugin_index()))}")
    elif not is_checked:
        say("Nothing was imported: rlplug plugins --check imports each one, and shows what fails.")


def _print_plugin(record: PluginRecord, is_verbose: bool) -> None:
    """Print one plugin as a block whose lines wrap, so that a narrow terminal cuts nothing."""
    api = f", hook API {record.api_range}" if record.api_range else ""
    say(
        (record.name, "bold"),
        " ",
        (record.state, STYLES[record.state]),
        f"; {record.reason}" if record.state == "loaded" and record.reason else "",
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
        _show_pairs((label, ", ".join(values)) for label, values in rows.items())
    if is_verbose:  # each on a line of its own, to be copied
        for label, value in (("file", record.file), ("docs", docs_url(record.distribution))):
            if value and (label, record.state) != ("file", "failed"):
                say(f"  {label}  {value}")


def _show_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print labels and texts side by side."""
    rows = list(pairs)
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        say(f"  {label:{width}}  {text}", wraps=True)
