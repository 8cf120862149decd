"""Checks of a command line that need no import of torch or Lightning: files, keys, and names of registered classes.

``keys.json`` has the keys; it is generated from the parser. Keys of Lightning's ``Trainer`` and of plugins' classes are
checked by the parser alone, which says the same, as are names where a local plugin may have classes of its own.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from rlplug.cli.configuration.short_forms import SHORT_KEYS
from rlplug.errors import ConfigError, did_you_mean, shorten
from rlplug.plugin_manager import plugins
from rlplug.plugin_names import local_names
from rlplug.registry import kind_of_key

_MOST_BYTES: Final = 1 << 20


@functools.cache
def known_keys() -> Mapping[str, list[str]]:
    """Return the names in each block of the core's options; a block is a key, such as ``model.batch``."""
    text = resources.files("rlplug.cli.configuration").joinpath("keys.json").read_text()
    keys: Mapping[str, list[str]] = json.loads(text)
    return keys


def check_early(arguments: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a configuration file that is not there, and a key or a class that does not exist."""
    for argument, value in zip(arguments, [*arguments[1:], ""], strict=True):
        option, _, given = argument.partition("=")
        if option in ("-c", "--config") and (path := given or value):
            require_file(Path(path))
            for key, named in _keys_of_file(path):
                _require(key)
                _require_class(key, named)
        elif option.startswith("--"):
            _require(key := option[2:].removesuffix("+"))
            _require_class(key, given or value)


def require_file(path: Path) -> None:
    """Raise ``ConfigError`` for a configuration that is no plain file, as far as its folder can be read."""
    if os.path.isfile(path) or not os.access(path.parent, os.X_OK):  # pathlib's raise where that may not be asked
        return
    what = "is a folder" if os.path.isdir(path) else "is no plain file" if os.path.exists(path) else "does not exist"
    raise ConfigError(f"the configuration {shorten(str(path))} {what}: give the path of a YAML file.")


def _require(key: str) -> None:
    *parts, name = key.split(".")
    for depth in range(len(parts)):
        block = ".".join(parts[: depth + 1])
        if (names := known_keys().get(block)) is None:
            return  # a class's own options, the trainer's, or a section that another command has
        if (following := [*parts, name][depth + 1]) not in names:
            every = [f"{outer}.{inner}" for outer, inners in known_keys().items() for inner in inners]
            raise ConfigError(unknown_key(f"{block}.{following}" if following else key, every))


def _require_class(key: str, value: Any) -> None:
    """Refuse a bare name that no plugin registers, where no local plugin may bring the class unregistered."""
    key = SHORT_KEYS.get(key, key)
    if (kind := kind_of_key(key)) is None or local_names():
        return
    for each in value if isinstance(value, list) else [value]:
        name = each.get("class_path") if isinstance(each, dict) else each
        known = ("null", *plugins().registry.names(kind))
        if isinstance(name, str) and name.isidentifier() and name not in known:
            unknown = plugins().registry.explain_unknown(kind, name)
            raise ConfigError(f"{key}: {unknown} Or give an import path, package.Class.")


def _keys_of_file(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a plain configuration file; of one that is not plain the whole reading says what is wrong."""
    import yaml

    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        content = None if len(text) > _MOST_BYTES or b"&" in text else yaml.load(text, yaml.CSafeLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return
    yield from _keys(content, "")


def _keys(block: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, value in block.items() if isinstance(block, dict) else ():
        if isinstance(name, str):
            key = f"{path}{name}"
            yield key, value
            if key in known_keys():
                yield from _keys(value, f"{key}.")


def unknown_key(name: str, keys: Sequence[str]) -> str:
    """Return the message for a key that does not exist."""
    return f"there is no key {shorten(name)}.{hint(name, keys)} All keys: rlplug fit --help=all"


def hint(name: str, keys: Sequence[str]) -> str:
    """Return what may be meant by a name that does not exist, as plugins know it, or by a similar one; or nothing."""
    known: str | None = plugins().hook.rlplug_explain_key(name=name)
    return f" {known}" if known else did_you_mean(name, [key for key in keys if not name.startswith(f"{key}.")])
