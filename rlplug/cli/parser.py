"""Argument parser: jsonargparse with short errors that name the key and the nearest valid one."""

from __future__ import annotations

from typing import Any, NoReturn

from jsonargparse._util import get_import_path
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

    def add_class_arguments(self, class_type: Any, *args: Any, key_default: Any = None, **options: Any) -> Any:
        """Add the arguments of a class; the class that is the default of a key has the key's values there."""
        added: Any = super().add_class_arguments(class_type, *args, **options)
        if key_default is not None and get_import_path(class_type) == key_default["class_path"]:
            self.set_defaults(key_default["init_args"])
        return added

    def add_function_arguments(self, function: Any, *args: Any, key_default: Any = None, **options: Any) -> Any:
        return super().add_function_arguments(function, *args, **options)

    def all_keys(self) -> list[str]:
        """Return every key of the parser and of its subcommands."""
        keys: list[str] = []
        for action in self._actions:
            inner: Any = action.choices if action.dest == "subcommand" else {}
            keys += [key for parser in inner.values() for key in parser.all_keys()] or [action.dest]
        return keys
