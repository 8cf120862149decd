"""Options of a command: ``CommandParser``, whose errors are of the kind of all others, and options of any command."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rlplug.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """Parser that shows a description as it is written, takes no shortened options, and raises :class:`ConfigError`.

    Args:
        command: Name of the command.
        usage: Its arguments, in one line.
        description: Help above that of the options.
    """

    def __init__(self, command: str, usage: str, description: str) -> None:
        super().__init__(
            f"rlplug {command}",
            usage=f"rlplug {command} {usage}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See {self.prog} --help.")


def take_option(arguments: list[str], option: str) -> tuple[list[str], list[str]]:
    """Return arguments without every ``OPTION VALUE`` and ``OPTION=VALUE``, and the values, empty where one lacks."""
    rest: list[str] = []
    values: list[str] = []
    each = iter(arguments)
    for argument in each:
        if argument == option:
            values.append(next(each, ""))
        elif argument.startswith(f"{option}="):
            values.append(argument.removeprefix(f"{option}="))
        else:
            rest.append(argument)
    return rest, values
