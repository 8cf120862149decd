"""Checks of configuration files, before jsonargparse reads them: encoding, size, duplicate keys, nesting, aliases."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from jsonargparse import get_loader, set_loader

from rlplug.cli.configuration.early_checks import require_file
from rlplug.cli.configuration.environment_values import is_of_variable, resolve_variables
from rlplug.cli.configuration.short_forms import write_out
from rlplug.errors import ConfigError, shorten
from rlplug.plugin_manager import plugins

MAX_BYTES: Final = 1 << 20
"""Size of the largest configuration file."""
MAX_NODES: Final = 100_000
"""Most values of a configuration, with what its aliases stand for."""
MAX_DEPTH: Final = 50
"""Deepest nesting of a configuration."""
MAX_DIGITS: Final = 100
"""Most digits of a whole number; beyond about 300 it is no float, beyond 4,300 Python reads none."""

_OF_CLASS: Final = ("class_path", "init_args", "dict_kwargs")
"""Keys of a block that names a class."""
_OTHER_BASE: Final = re.compile(r"[-+]?(0[0-7_]+|[1-9][\d_]*(:[0-5]?\d)+)")  # 010 is 8, and 1:30 is 90
_LINE_BREAK: Final = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
"""What ends a line of YAML."""
_jsonargparse_load: Final = get_loader("yaml")


class _FileError(yaml.YAMLError):
    """Fault of a YAML text, with its line; a ``YAMLError``, so that jsonargparse reports it as one of the value."""

    def __init__(self, event: Any, reason: str) -> None:
        super().__init__(f"line {event.start_mark.line + 1}: {reason}")


@dataclass
class _Block:
    """A mapping or list that is being read, with its size so far."""

    is_mapping: bool = False
    anchor: str | None = None
    keys: set[str] = field(default_factory=set)
    is_key: bool = True
    size: int = 1


def check_config_files(arguments: list[str]) -> list[dict[str, Any]]:
    """Return what is in each file that ``arguments`` name with ``-c`` or ``--config``, without short forms.

    Raises:
        ConfigError: The message names the file, the line where there is one, and the fix.
    """
    contents = []
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, given = option.partition("=")
        text = given or value
        if name in ("-c", "--config") and text:
            contents.append(check_config_file(Path(text)))
        elif text.startswith(("{", "[")):
            with suppress(yaml.YAMLError):  # of which the parser says the key, as it does not of all that is misspelt
                load_yaml(text)
    return contents


def check_config_file(path: Path) -> dict[str, Any]:
    """Return what is in ``path``, a readable text in YAML that holds options.

    Raises:
        ConfigError: It is not; the message names the file, the line where there is one, and the fix.
    """
    require_file(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the configuration {str(path)!r} cannot be read: {error.strerror}. Give another.") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"the configuration {str(path)!r} is longer than {MAX_BYTES >> 20} MiB: give a YAML file.")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = f"{raw[error.start]:#04x}"
        raise ConfigError(f"{path}:{line}: the byte {byte} is not UTF-8: save the file as UTF-8.") from error
    try:
        content = load_yaml(text, path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())[:500]}. Correct the file.") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: the file holds {'nothing' if content is None or text.isspace() or not text else 'no block'}: "
            "give options such as `model:`; configs/quickstart.yaml is a complete configuration."
        )
    if other := [key for key in content if not isinstance(key, str)]:
        raise ConfigError(f"{path}: the key {other[0]!r} is no text: remove it.")
    return content


def load_yaml(text: str, path: str | Path | None = None) -> Any:
    """Read YAML as jsonargparse does, and refuse what it would take in silence or never finish.

    Args:
        path: File that the text is of, whose ``${NAME}`` are resolved and short forms written out; ``None`` for an
            option, where a shell does the one and ``short_forms.write_out_arguments`` has done the other. jsonargparse
            gives it by this name.

    Raises:
        ConfigError: A ``${NAME}`` cannot be resolved, or a key beside ``class_path`` is misspelt.
        yaml.YAMLError: The text is no YAML, writes a key twice, nests deeper than ``MAX_DEPTH``, or has more than
            ``MAX_NODES`` values once its aliases are written out.
    """
    plain = str.__str__(text)  # the parser takes no subclass
    try:
        _check(plain, is_file=path is not None)
        loaded = _jsonargparse_load(plain)
    except UnicodeEncodeError as error:
        raise yaml.YAMLError(f"the text holds {error.object[error.start]!r}, which is no character") from error
    except yaml.MarkedYAMLError as error:
        raise yaml.YAMLError(_explain(error, plain)) from error
    except yaml.reader.ReaderError as error:
        found = chr(error.character)
        raise yaml.YAMLError(f"the character {found!r} at position {error.position}: {error.reason}") from error
    if path is not None:
        loaded = resolve_variables(loaded)
        loaded = write_out(loaded) if path and isinstance(loaded, dict) else loaded
    plugins().registry.import_named(set(_texts(loaded)))  # jsonargparse knows the classes that are imported
    if is_of_variable(text):  # jsonargparse reads texts of options again, to find what type they are
        return text if isinstance(loaded, dict | list) else loaded
    return loaded


def _texts(loaded: Any) -> Iterator[str]:
    """Yield the texts among the values of what was read."""
    if isinstance(loaded, str):
        yield loaded
    elif isinstance(loaded, dict | list):
        if isinstance(loaded, dict) and len(loaded) <= len(_OF_CLASS):
            _check_class(loaded)
        for value in loaded.values() if isinstance(loaded, dict) else loaded:
            yield from _texts(value)


def _check_class(block: dict[str, Any]) -> None:
    """Refuse a misspelt key of a block that names a class, where all are such keys, and a name that is no text."""
    if not isinstance(block.get("class_path", ""), str):
        raise ConfigError(f"class_path is {shorten(block['class_path'])}: give the name of a class, or package.Class.")
    near = {str(key): "".join(difflib.get_close_matches(str(key), _OF_CLASS, 1, 0.8)) for key in block}
    if all(near.values()) and (wrong := [key for key, meant in near.items() if meant != key]):
        raise ConfigError(f"there is no key {wrong[0]!r} beside {shorten(block)}: write {near[wrong[0]]}.")


def _explain(error: yaml.MarkedYAMLError, text: str) -> str:
    """Return the line of a fault and what it is, without the name that PyYAML gives to a text."""
    began, mark = error.context_mark, error.problem_mark or error.context_mark
    if mark is None:
        return " ".join(filter(None, (error.context, error.problem)))
    before = "".join(_LINE_BREAK.split(text)[mark.line : mark.line + 1])[: mark.column + 1]  # may be past the end
    if before.endswith("\t") and before.isspace():
        return f"line {mark.line + 1} is indented with a tab: YAML takes spaces"
    context = f" ({error.context}, from line {began.line + 1})" if error.context and began is not None else ""
    problem = str(error.problem).replace("found unhashable key", "a list or a block is a key")
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{context}"


def _check(text: str, is_file: bool) -> None:
    """Go through the parser's events, which takes no memory for what aliases stand for."""
    stack: list[_Block] = [_Block()]
    anchors: dict[str, int] = {}
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.DocumentStartEvent) and stack[0].size > 1:
            raise _FileError(event, "a second document begins here: keep one")
        if isinstance(event, yaml.CollectionEndEvent):
            block = stack.pop()
            if block.anchor is not None:
                anchors[block.anchor] = block.size
            _add(stack[-1], event, block.size)
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(stack) > MAX_DEPTH:
                raise _FileError(event, f"blocks are nested deeper than {MAX_DEPTH}")
            stack.append(_Block(isinstance(event, yaml.MappingStartEvent), event.anchor))
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise _FileError(event, f"the alias *{event.anchor} stands for nothing, or for a block that holds it")
            _add(stack[-1], event, anchors[event.anchor])
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > MAX_DIGITS and event.implicit[0] and event.value.lstrip("+-").isdigit():
                raise _FileError(event, f"a number has {len(event.value)} digits")
            if is_file and event.implicit[0] and _OTHER_BASE.fullmatch(event.value):
                raise _FileError(event, f"{event.value} is a number of base 8 or 60: write one of base 10, or a 'text'")
            if event.anchor is not None:
                anchors[event.anchor] = 1
            block = stack[-1]
            if block.is_mapping and block.is_key:
                if event.value in block.keys:
                    raise _FileError(event, f"the key {event.value!r} is there twice: remove one")
                block.keys.add(event.value)
            _add(block, event, 1)


def _add(block: _Block, event: Any, size: int) -> None:
    """Count a value of ``block``, and know whether the next one is a key."""
    block.size += size
    block.is_key = not block.is_key
    if block.size > MAX_NODES:
        raise _FileError(event, f"aliases or lists make more than {MAX_NODES:,} values")


set_loader("yaml", load_yaml, exceptions=(yaml.YAMLError,), json_superset=True)
