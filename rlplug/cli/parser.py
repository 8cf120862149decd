"""Argument parser: jsonargparse with short errors that name the key and the nearest valid one."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from rlplug.errors import ConfigError


class RLArgumentParser(LightningArgumentParser):
    """Parser that raises :class:`ConfigError` where jsonargparse would print the usage and exit.

    jsonargparse makes parsers of the same class for the ``init_args`` of classes inside the configuration; the outer
    parser wraps their errors, key by key.
    """

    def format_help(self, formatter: Any = None) -> str:
        """Return the help with the options of Lightning's Trainer after all others."""
        groups = self._action_groups
        trainer = [group for group in groups if any(f"{x.dest}.".startswith("trainer.") for x in group._group_actions)]
        if not trainer:
            return super().format_help(formatter)
        usage, self.usage = self.usage, f"rlplug {self.prog.split()[-1]} [-c CONFIG] [--KEY VALUE] ..."
        self._action_groups = [group for group in groups if group not in trainer] + trainer
        try:
            text = super().format_help(formatter)
        finally:
            self.usage, self._action_groups = usage, groups
        return text.replace(" \b", "")  # jsonargparse has a terminal erase the blank before [=flags]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        from rlplug.cli.messages import explain_error

        raise ConfigError(explain_error(message, ex, self.all_keys, self.prog.split()[-1])) from ex

    def all_keys(self) -> list[str]:
        """Return every key of the parser and of its subcommands."""
        keys: list[str] = []
        for action in self._actions:
            if action.dest == "subcommand":
                parsers: Any = action.choices
                keys += [key for parser in parsers.values() for key in parser.all_keys()]
            else:
                keys.append(action.dest)
        return keys
