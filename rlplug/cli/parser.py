"""Argument parser: jsonargparse with short errors that name the key and the nearest valid one."""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from rlplug.data.sources import PromptSource
from rlplug.errors import ConfigError, did_you_mean
from rlplug.plugin_manager import plugins
from rlplug.registry import KNOWN_DISTRIBUTIONS

KIND_OF_KEY: Final = {
    "model.algorithm": "algorithms",
    "model.trainer": "trainers",
    "model.rollout": "rollouts",
    "model.rewards": "rewards",
    "model.environment": "environments",
    "model.optimizations": "optimizations",
}
"""Kind of the registered classes that a key of the configuration names."""

_UNKNOWN_KEY: Final = re.compile(r"does not accept option '([^']+)'|unrecognized arguments: (?:--)?([^\s=]+)")
_UNKNOWN_CLASS: Final = re.compile(r'Parser key "([^"]+)":.*Expected a dot import path string: (\S+)', re.S)
_UNKNOWN_OPTION: Final = re.compile(r"^Option '([^']+)' is not accepted")
_MISSING: Final = re.compile(r"arguments are required: (?:fit\.|validate\.)?(.+)")


class RLArgumentParser(LightningArgumentParser):
    """Parser that raises :class:`ConfigError` where jsonargparse would print the usage and exit.

    jsonargparse makes parsers of the same class for the ``init_args`` of classes inside the configuration; the outer
    parser wraps their errors, key by key.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ConfigError(self._explain(message)) from ex

    def _explain(self, message: str) -> str:
        if found := _UNKNOWN_KEY.search(message):
            key = next(filter(None, found.groups()))
            return f"there is no key {key!r}.{did_you_mean(key, self._keys())} All keys: rlplug fit --help"
        if found := _UNKNOWN_OPTION.search(message):
            options = [key for key in self._keys() if key not in ("help", "config")]
            return f"there is no option {found[1]!r}.{did_you_mean(found[1], options)} Options: {', '.join(options)}."
        if found := _UNKNOWN_CLASS.search(message):
            return f"{found[1]}: {_explain_class(found[1], found[2])} Or give an import path, package.Class."
        if found := _MISSING.search(message):
            return f"the configuration lacks {found[1]}: set it. configs/quickstart.yaml is a complete configuration."
        one_line = " ".join(line.strip() for line in message.splitlines() if line.strip())
        return re.sub(r'Parser key "([^"]+)":', r"\1:", one_line)

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


def _explain_class(key: str, name: str) -> str:
    if kind := KIND_OF_KEY.get(key):
        for record in plugins().records:
            if record.state == "blocked" and record.distribution == KNOWN_DISTRIBUTIONS.get(name):
                return f"{name!r} comes with {record.distribution}, which is blocked: drop --block {record.name}."
        return plugins().registry.explain_unknown(kind, name)
    known = [source.__name__ for source in PromptSource.__subclasses__()] if key in ("data.train", "data.val") else []
    return f"{name!r} is not a known class.{did_you_mean(name, known)}"
