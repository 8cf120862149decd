"""``rlplug completion``: a script with which a shell completes commands and keys.

The script holds all of them, so that a shell starts no process at a Tab.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn

import shtab

from rlplug.cli.lightning_cli import RLCLI, read_command

FILES: Final = {"-c", "--config", "--ckpt_path", "--resume", "--run.dir", "--status", "--stop", "--folder", "--rates"}
"""Options whose value is a file or a folder."""
SPLIT_OPTIONS: Final = ("--split-gpus", "--rates", "--engine-tokens-s", "--trainer-tokens-s")
LAUNCH: Final = ("--launcher", "--dry-run", "--status", "--stop")
OTHERS: Final = {
    "plugins": ("--check", "--verbose", "--run", "--json", "--block"),
    "new-plugin": ("--kind", "--folder"),
    "doctor": ("--json", "--quick", "--block"),
    "report": (),
    "watch": ("--port", "--host", "--open"),
    "completion": (),
}
"""Options of the commands that take no configuration."""


class _Keys(BaseException):
    """Options of each command; it leaves the constructor of Lightning's CLI, which would parse and run."""

    def __init__(self, options: dict[str, list[str]]) -> None:
        super().__init__()
        self.options = options


class _KeysCLI(RLCLI):
    def parse_arguments(self, parser: Any, args: Any) -> NoReturn:
        (commands,) = (action for action in parser._actions if action.dest == "subcommand")
        raise _Keys(
            {
                name: [option for action in command._actions for option in action.option_strings]
                for name, command in commands.choices.items()
            }
        )


def completion_command(arguments: Sequence[str]) -> None:
    """Print the script of a shell.

    Args:
        arguments: Those after the command's name: the shell.
    """
    description = 'Print a script that completes commands and keys: eval "$(rlplug completion bash)"'
    parser = argparse.ArgumentParser("rlplug completion", description=description)
    parser.add_argument("shell", choices=("bash", "zsh"))
    print(shtab.complete(command_parser(), parser.parse_args(arguments).shell))


def command_parser() -> argparse.ArgumentParser:
    """Return a parser of every command with its options, to complete and not to parse."""
    options = options_of_commands()
    options |= {
        "plan": [*options["fit"], "--gpu-gib", "--network-gbit-s", *SPLIT_OPTIONS],
        "launch": [*options["fit"], *LAUNCH],
        **OTHERS,
    }
    parser = argparse.ArgumentParser("rlplug")
    parser.add_argument("--version", action="version", version="")
    commands = parser.add_subparsers()
    for name, its_options in options.items():
        command = commands.add_parser(name, help=name)  # shtab leaves out what has no help
        if name in ("report", "watch"):
            _completes_files(command.add_argument("folder"))
        for option in dict.fromkeys(its_options):
            if option not in ("-h", "--help"):
                action = command.add_argument(option, help=option)
                if option in FILES:
                    _completes_files(action)
    return parser


def options_of_commands() -> dict[str, Iterable[str]]:
    """Return the options of ``fit`` and ``validate``."""
    try:
        read_command(_KeysCLI, ["fit"])
    except _Keys as found:
        return {name: [*options, "--resume", "--help-all"] for name, options in found.options.items()}
    raise AssertionError("the constructor parses")


def _completes_files(action: Any) -> None:
    action.complete = shtab.FILE
