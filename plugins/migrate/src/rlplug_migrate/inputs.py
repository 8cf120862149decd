"""Reads a configuration of another framework: a YAML file, a shell script that starts it, or its arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from rlplug.errors import ConfigError, describe, shorten
from rlplug_migrate.conversion import Unresolved
from rlplug_migrate.interpolations import resolve_all
from rlplug_migrate.keys import Framework
from rlplug_migrate.scalars import Loader, scalar
from rlplug_migrate.shell import Word, arguments_of

_MOST_BYTES: Final = 1 << 20
_OVERRIDE: Final = re.compile(r"(~|\+{0,2})([A-Za-z_][\w./@-]*)(?:=(.*))?", re.DOTALL)
_OF_HYDRA: Final = ("defaults", "hydra", "_target_")
"""Keys that say how a configuration is put together; what they name are the defaults that the table has."""


class NoConfiguration(ConfigError):
    """The file is no configuration of the framework."""


def read_file(framework: Framework, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a YAML file, or of the arguments in a shell script, by full key; and doubts of a script's.

    Raises:
        ConfigError: The file cannot be read.
        NoConfiguration: It has no key of the framework.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: it cannot be read ({describe(error)}).") from error
    if len(content) > _MOST_BYTES:
        raise NoConfiguration(f"{path} is longer than 1 MiB: give a configuration of {framework.name}.")
    if path.suffix in (".yaml", ".yml"):
        return _checked(framework, dict(_flat(_load(text, path), "")), str(path)), {}
    if (found := arguments_of(text, framework.program)) is None:
        raise NoConfiguration(f"{path} starts no {framework.name}: give its YAML, or a shell script that starts it.")
    words, doubts = found
    return _checked(framework, read_arguments(framework, words), str(path)), doubts


def read_command(framework: Framework, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of arguments of the framework, by full key.

    Raises:
        NoConfiguration: They have no key of the framework.
    """
    return _checked(framework, read_arguments(framework, [Word(each) for each in arguments]), "what is given")


def _load(text: str, path: Path) -> Any:
    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        raise NoConfiguration(f"{path} is no YAML: {' '.join(describe(error).split())}.") from error


def _flat(block: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, value in block.items() if isinstance(block, dict) else ():
        if name in _OF_HYDRA:
            continue
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _checked(framework: Framework, values: Mapping[str, Any], what: str) -> dict[str, Any]:
    known = [name for name in values if framework.find(name) is not None]
    if not known or not any(name.partition(".")[0] in framework.sections for name in known):
        names = ", ".join(sorted(framework.sections)[:4])
        raise NoConfiguration(
            f"{what} is no configuration of {framework.name}: it has none of its keys, such as {names}."
        )
    return {name: _typed(framework, name, value) for name, value in resolve_all(values).items()}


def _typed(framework: Framework, name: str, value: Any) -> Any:
    """Return a value as a number, where the framework's default is one."""
    key = framework.by_name.get(name)
    if key is None or type(key.default) not in (int, float) or value is None or isinstance(value, Unresolved):
        return value
    found = scalar(value) if isinstance(value, str) else value
    is_threshold = isinstance(value, str) and re.fullmatch(r"[\d.]+_[\d.]+", value)  # verl's "0.5_5.0"
    if is_threshold or (isinstance(found, (int, float)) and not isinstance(found, bool)):
        return value if is_threshold else found
    raise ConfigError(f"{name} is {shorten(str(value))}: give a number, as {framework.name} takes.")


def read_arguments(framework: Framework, words: Sequence[Word]) -> dict[str, Any]:
    """Return the values of arguments: ``--key value`` or Hydra's ``key=value``, whichever the framework takes."""
    return dict(_options(words) if framework.takes_options else _overrides(words))


def _overrides(words: Sequence[Word]) -> Iterator[tuple[str, Any]]:
    """Yield key and value of Hydra's overrides; ``~key`` removes what stood before it."""
    for word in words:
        found = _OVERRIDE.fullmatch(word.text)
        if found is None or (found[3] is None and found[1] != "~"):
            raise ConfigError(f"{shorten(word.text)} is no override of Hydra's: write key=value.")
        yield found[2], None if found[1] == "~" else _value(word, found[3])


def _options(words: Sequence[Word]) -> Iterator[tuple[str, Any]]:
    """Yield key and values of ``--key value ...``; a key without a value is a flag."""
    given: list[tuple[str, list[Any]]] = []
    for word in words:
        if word.text.startswith("--"):
            name, equals, _ = word.text[2:].partition("=")
            given.append((name.replace("-", "_"), [_value(word, word.text.partition("=")[2])] if equals else []))
        elif given:
            given[-1][1].append(_value(word, word.text))
        else:
            raise ConfigError(f"{shorten(word.text)} is no option: write --key value.")
    for name, values in given:
        unresolved = [value for value in values if isinstance(value, Unresolved)]
        yield name, unresolved[0] if unresolved else values if len(values) > 1 else values[0] if values else True


def _value(word: Word, text: str) -> Any:
    if word.unknown:
        return Unresolved(text, f"not resolved: {word.unknown}")
    return scalar(text.rstrip(",") if text.endswith(",") and len(text) > 1 else text)
