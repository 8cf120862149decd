"""Argument parser: jsonargparse with short errors that name the key and the nearest valid one."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any, Final, NoReturn, get_type_hints

from lightning.pytorch.cli import LightningArgumentParser

from rlplug.cli.configuration.early_checks import hint, unknown_key
from rlplug.config import RunConfig
from rlplug.errors import ConfigError

MAX_LENGTH: Final = 800
"""Longest message, in characters."""

_UNKNOWN_KEY: Final = re.compile(r"does not accept option '([^']+)'|unrecognized arguments: (?:--)?([^\s=]+)")
_UNKNOWN_WORD: Final = re.compile(r"unrecognized arguments: ([^\s-]\S*)")
_UNKNOWN_OPTION: Final = re.compile(r"^Option '([^']+)' is not accepted")
_NO_SUBCLASS: Final = re.compile(r"Subclasses are disabled for (\w+), thus '([^']+)'")
_MISSING: Final = re.compile(r"arguments are required: (.+)")


class RLArgumentParser(LightningArgumentParser):
    """Parser that raises :class:`ConfigError` where jsonargparse would print the usage and exit.

    jsonargparse makes parsers of the same class for the ``init_args`` of classes inside the configuration; the outer
    parser wraps their errors, key by key.
    """

    def format_help(self, formatter: Any = None) -> str:
        """Return the help with the options of Lightning's Trainer after all others."""
        groups = self._action_groups
        trainer = [group for group in groups if any(_is_of_trainer(action) for action in group._group_actions)]
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
        raise ConfigError(self._explain(message, ex)) from ex

    def _explain(self, message: str, ex: Exception | None) -> str:
        from rlplug.cli.messages import explain_import, explain_value

        key, body = _split_key(message)
        if (problem := explain_import(ex)) is not None:
            return _cut(problem if key is None else f"{key}: {problem}")
        if found := _MISSING.search(message):
            lacking = " and ".join(re.sub(r"\b(?:fit|validate)\.", "", found[1]).split(", "))
            example = " configs/quickstart.yaml is a complete configuration." if "." in lacking else ""
            return f"the configuration lacks {lacking}: set it.{example}"
        if key is None and (found := _UNKNOWN_WORD.search(message)) and (fix := self._explain_word(found[1])):
            return fix
        if key is None and (found := _UNKNOWN_KEY.search(message)):
            name = next(filter(None, found.groups()))
            return unknown_key(name, self._keys())
        if key is None and (found := _UNKNOWN_OPTION.search(message)):
            options = [name for name in self._keys() if name != "config" and not name.endswith("help")]
            known = "All keys: rlplug fit --help=all" if "model" in options else f"Options: {', '.join(options)}."
            return f"there is no option {found[1]!r}.{hint(found[1], options)} {known}"
        if found := _NO_SUBCLASS.search(message):
            blocks = [f"model.{name}" for name, hint in get_type_hints(RunConfig).items() if found[1] in str(hint)]
            return f"{' or '.join(blocks) or found[1]} has the class_path {found[2]!r}: give its options alone."
        return _cut(" ".join(message.split()) if key is None else explain_value(key, body))

    def _explain_word(self, word: str) -> str | None:
        """Return what to write for a word without ``--``, or ``None`` where it is neither key nor configuration."""
        name, equals, value = word.lstrip("+").partition("=")
        depth = max(1, name.count("."))
        parents = [name.rsplit(".", number)[0] for number in range(depth)]  # a class's options have its key
        if equals and not {*parents}.isdisjoint(self._keys()):
            return f"write --{name} {'VALUE' if value[:1] in tuple('[{') else value}: keys begin with --."
        if word.endswith((".yaml", ".yml")) or os.path.isfile(word):
            return f"give the configuration {word} with -c, as in: rlplug {self.prog.split()[-1]} -c {word}"
        return None

    def _keys(self) -> list[str]:
        """Return every key of the parser and of its subcommands."""
        keys: list[str] = []
        for action in self._actions:
            if action.dest == "subcommand":
                parsers: Any = action.choices
                keys += [key for parser in parsers.values() for key in parser._keys()]
            else:
                keys.append(action.dest)
        return keys


def _cut(text: str) -> str:
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 100]} ... {text[-80:]}"


def _split_key(message: str) -> tuple[str | None, list[str]]:
    """Return the key that jsonargparse's message is about, and its other lines."""
    found = re.match(r'Parser key "([^"]+)":|--(\S+)\.help:', message)
    if found is None:
        return None, []
    return found[1] or found[2], [line for line in message[found.end() :].splitlines() if line.strip()]


def _is_of_trainer(action: argparse.Action) -> bool:
    return action.dest == "trainer" or action.dest.startswith("trainer.")
