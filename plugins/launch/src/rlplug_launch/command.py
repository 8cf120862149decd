"""``rlplug launch``: start a run on one or many hosts, look at its tasks, or stop it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from rlplug.cli.command_parser import CommandParser
from rlplug.errors import ConfigError

DESCRIPTION: Final = """start a run on one or many hosts, with engine servers beside it

  -c, --config CONFIG    and all other options of rlplug fit; the section `launch` says the rest
  --launch.KEY VALUE     overrides a key of the section: rlplug launch --help=all lists them
"""
TAKES_CONFIGURATION: Final = True


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of what is not a key of the configuration."""
    parser = CommandParser("launch", "-c CONFIG [--launcher NAME] [--dry-run] ...", DESCRIPTION)
    add = parser.add_argument
    add(
        "--launcher",
        metavar="NAME",
        help="local (the default), slurm, or one of a plugin, such as ray; --launch.launcher takes its options too",
    )
    add("--dry-run", action="store_true", help="print where everything would run, or the job's script; start nothing")
    add("--resume", type=Path, metavar="RUN", help="go on with a run, with the launch options that it had")
    add("--status", type=Path, metavar="RUN", help="show the tasks of a run that was launched; stands alone")
    add("--stop", type=Path, metavar="RUN", help="have it save and stop; stands alone")
    return parser


def launch_command(arguments: list[str]) -> int:
    """Train on one or many hosts, with engine servers: -c CONFIG --launcher slurm.

    Raises:
        ConfigError: The configuration is wrong, or a node lacks something.
    """
    options, rest = make_parser().parse_known_args(arguments)
    if options.status is None and options.stop is None:
        from rlplug_launch.run import launch_run

        return launch_run([argument for argument in arguments if argument != "--dry-run"], options.dry_run)
    if rest or len(arguments) != 2:
        raise ConfigError("--status RUN and --stop RUN stand alone: give one of them, and nothing else.")
    from rlplug_launch.status import show_status, stop

    if options.stop is not None:
        stop(options.stop)
        return 0
    return 0 if show_status(options.status) else 1
