"""``rlplug completion``: a script with which a shell completes commands and keys.

The script holds all of them, so that a shell starts no process at a Tab.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import shtab

from rlplug.cli.configuration.short_forms import FLAGS, SHORT_KEYS
from rlplug.cli.find_commands import find_commands
from rlplug.cli.lightning_cli import RLCLI, read_command

FILES: Final = {"-c", "--config", "--ckpt_path", "--resume", "--run.dir"}
"""Options of ``rlplug fit`` whose value is a file or a folder."""


class _Keys(BaseException):
    """Options of a command; it leaves the constructor of Lightning's CLI, which would parse and run."""

    def __init__(self, options: list[str]) -> None:
        super().__init__()
        self.options = options


class _KeysCLI(RLCLI):
    def parse_arguments(self, parser: Any, args: Any) -> NoReturn:
        (commands,) = (action for action in parser._actions if action.dest == "subcommand")
        (command,) = commands.choices.values()
        raise _Keys([option for action in command._actions for option in action.option_strings])


def make_parser() -> argparse.ArgumentParser:
    description = 'Print a script that completes commands and keys: eval "$(rlplug completion bash)"'
    parser = argparse.ArgumentParser("rlplug completion", description=description)
    parser.add_argument("shell", choices=("bash", "zsh"))
    return parser


def completion_command(arguments: list[str]) -> None:
    """Print a script that completes commands and keys: bash, or zsh."""
    print(shtab.complete(command_parser(), make_parser().parse_args(arguments).shell))


def command_parser() -> argparse.ArgumentParser:
    """Return a parser of every installed command with its options, to complete and not to parse."""
    of_fit = {name: options_of(name) for name in ("fit", "validate")}
    parser = argparse.ArgumentParser("rlplug")
    parser.add_argument("--version", action="version", version="")
    commands = parser.add_subparsers()
    for name, entry_point in find_commands().items():
        command = commands.add_parser(name, help=name)  # shtab leaves out what has no help
        actions: list[argparse.Action] = []
        options = list(of_fit.get(name, ()))
        if name not in of_fit:
            module = importlib.import_module(entry_point.module)
            actions = module.make_parser()._actions if hasattr(module, "make_parser") else []
            if getattr(module, "TAKES_CONFIGURATION", False):
                options = [option for option in of_fit["fit"] if "." in option or option in FILES]
        for action in actions:
            takes_file = action.type is Path or not FILES.isdisjoint(action.option_strings)
            if action.option_strings or takes_file:
                _add(command, action.option_strings or [action.dest], takes_file)
        known = {option for action in actions for option in action.option_strings}
        for option in dict.fromkeys(options):
            if option not in known:
                _add(command, [option], option in FILES)
    return parser


def _add(command: argparse.ArgumentParser, names: Sequence[str], takes_file: bool) -> None:
    if not {"-h", "--help"} & {*names}:
        action: Any = command.add_argument(*names, help=names[0])
        if takes_file:
            action.complete = shtab.FILE


def options_of(command: str) -> list[str]:
    """Return the options of ``fit`` or ``validate``."""
    try:
        read_command(_KeysCLI, [command])
    except _Keys as found:
        return [*found.options, "--resume", *(f"--{key}" for key in SHORT_KEYS), *FLAGS, "--help=all"]
    raise AssertionError("the constructor parses")
