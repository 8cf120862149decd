"""Command line: ``rlplug fit | validate | plan | plugins | report``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlplug.errors import ConfigError, RLPlugError
from rlplug.plugin_manager import BLOCK_VARIABLE, PluginManager, PluginRecord, describe, use_plugins
from rlplug.registry import KNOWN_DISTRIBUTIONS

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2

DESCRIPTION: Final = """reinforcement-learning post-training of language models as PyTorch Lightning plugins

  rlplug fit -c configs/quickstart.yaml          train; later -c files and --key value override earlier ones
  rlplug fit --resume runs/quickstart/001        go on with a run that was stopped, from its newest checkpoint
  rlplug validate -c CONFIG --ckpt_path PATH     score held-out prompts
  rlplug plan -c CONFIG --gpu-gib 80             what will live on each GPU, without one; does it fit?
  rlplug plugins                                 what is installed, loaded, blocked, failed
  rlplug report runs/quickstart/001              write report.html from a run folder

Every key of a configuration: rlplug fit --help; of one class: rlplug fit --model.algorithm.help GRPO
"""

PLAN_DESCRIPTION: Final = """what will live on each GPU in each phase of a step, and whether it fits; nothing is loaded

  -c, --config CONFIG    and all other options of rlplug fit: see rlplug fit --help
  --gpu-gib GIB          memory of each GPU; by default that of this machine's first

Exit status 1: it does not fit, and the smallest change that makes it fit is printed.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status; errors print as one message unless ``--debug``."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = _take_flag(arguments, "--debug")
    try:
        blocked = _take_values(arguments, "--block", "the name of a plugin")
        return _run(arguments, blocked)
    except RLPlugError as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"rlplug: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR


def _run(arguments: list[str], blocked: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(f"usage: rlplug [--debug] [--block PLUGIN] {{fit,validate,plan,plugins,report}} ...\n\n{DESCRIPTION}")
        return 0 if arguments else EXIT_USAGE
    if command == "plugins":
        return _plugins_command(arguments[1:], blocked)
    if command == "report":
        return _report_command(arguments[1:])
    if command not in ("fit", "validate", "plan"):
        raise ConfigError(f"there is no command {command!r}: use fit, validate, plan, plugins or report.")
    sys.path.insert(0, os.getcwd())  # so that a reward function next to the configuration can be named
    manager = use_plugins(PluginManager(blocked))
    os.environ[BLOCK_VARIABLE] = ",".join(manager.blocked)  # for the ranks that Lightning starts
    if command == "plan":
        return _plan_command(arguments[1:])
    from rlplug.cli.lightning_cli import run_lightning

    return run_lightning(arguments)


def _plugins_command(arguments: list[str], blocked: list[str]) -> int:
    parser = argparse.ArgumentParser("rlplug plugins", description="Show the installed plugins and their state.")
    parser.add_argument("--json", action="store_true", help="print the table as JSON, for machines")
    options = parser.parse_args(arguments)
    records = PluginManager(blocked, strict=False).records
    if options.json:
        print(json.dumps(describe(records), indent=2))
    else:
        for record in records:
            _print_plugin(record)
        if len(records) == 1:
            published = ", ".join(sorted(set(KNOWN_DISTRIBUTIONS.values())))
            print(f"no plugins are installed: pip install one of {published}")
    return EXIT_ERROR if any(record.state == "failed" for record in records) else 0


def _print_plugin(record: PluginRecord) -> None:
    """Print one plugin as a block whose lines wrap, so that a narrow terminal cuts nothing."""
    console = Console(highlight=False)
    state = Text(record.state, {"loaded": "green", "blocked": "yellow", "failed": "red"}[record.state])
    api = f", hook API {record.api_range}" if record.api_range else ""
    title = Text.assemble((record.name, "bold"), " ", state, f" ({record.distribution} {record.version}{api})")
    console.print(title, soft_wrap=True)
    rows: dict[str, list[str]] = {}
    for registered in record.registers:
        kind, name = registered.split("/")
        rows.setdefault(kind, []).append(name)
    if record.hooks:
        rows["hooks"] = [name.removeprefix("rlplug_") for name in record.hooks]
    if record.state == "failed":
        console.print(f"  file  {record.file or 'not found'}", soft_wrap=True, markup=False)
        rows = {"reason": [record.reason]}
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, values in rows.items():
        grid.add_row(f"  {label}", Text(", ".join(values)))
    if rows:
        console.print(grid)


def _plan_command(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(f"usage: rlplug plan [--gpu-gib GIB] -c CONFIG ...\n\n{PLAN_DESCRIPTION}")
        return 0
    gpu_gib = _take_values(arguments, "--gpu-gib", "a number of GiB, such as 80")
    from rlplug.cli.plan_command import plan_command

    return 0 if plan_command(arguments, gpu_gib[-1] if gpu_gib else None) else EXIT_ERROR


def _report_command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("rlplug report", description="Write report.html from the folder of a run.")
    parser.add_argument("run_dir", type=Path, help="a run's folder, such as runs/quickstart/001")
    from rlplug.observability.report import write_report

    print(write_report(parser.parse_args(arguments).run_dir))
    return 0


def _take_flag(arguments: list[str], flag: str) -> bool:
    if flag not in arguments:
        return False
    arguments.remove(flag)
    return True


def _take_values(arguments: list[str], option: str, what: str) -> list[str]:
    """Remove every ``option VALUE`` from ``arguments`` and return the values; ``what`` describes them in errors."""
    values = []
    while option in arguments:
        index = arguments.index(option)
        if index + 1 == len(arguments):
            raise ConfigError(f"{option} needs {what}.")
        values.append(arguments[index + 1])
        del arguments[index : index + 2]
    return values
