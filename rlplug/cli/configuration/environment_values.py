"""``${NAME}`` in YAML: values from environment variables, which are data and are saved as references."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, Final

import yaml
from jsonargparse import Namespace, _typehints
from jsonargparse.typing import register_type

from rlplug.errors import ConfigError

_FORM: Final = re.compile(r"\$\$\{|\$\{(?P<inside>[^}]*)\}|\$\{")
"""An escaped ``$${``; a reference; or one that does not end."""
_INSIDE: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<has_default>:-(?P<default>.*))?", re.ASCII | re.DOTALL)
_FIX: Final = "write ${NAME} or ${NAME:-default}, and $${ for a literal ${"

_RESOLVED: Final[set[str]] = set()
"""Texts that were read from variables, which are no YAML wherever they turn up again."""


class VariableText(str):
    """Text that was read from environment variables, with the references that it came from.

    Attributes:
        reference: Text as the YAML file has it, such as ``${HOME}/data``.
    """

    reference: str

    def __new__(cls, value: str, reference: str = "") -> VariableText:  # of a copy, which gets it after that
        text = super().__new__(cls, value)
        text.reference = reference
        return text


def resolve_variables(value: Any, key: str = "") -> Any:
    """Return loaded YAML with the values of environment variables for ``${NAME}`` in its texts, but not in its keys.

    A value is never read as YAML structure: text with a reference stays one text, a :class:`VariableText`.

    Args:
        key: Key of ``value``, for messages.

    Raises:
        ConfigError: A variable is not set and has no default, or a reference has another form.
    """
    if isinstance(value, dict):
        return {name: resolve_variables(part, f"{key}.{name}" if key else str(name)) for name, part in value.items()}
    if isinstance(value, list):
        return [resolve_variables(part, f"{key}[{index}]") for index, part in enumerate(value)]
    if not isinstance(value, str) or isinstance(value, VariableText) or "${" not in value:
        return value
    text = _FORM.sub(lambda found: _value_of(found, key), value)
    is_escaped_only = all(found[0] == "$${" for found in _FORM.finditer(value))
    if is_escaped_only:
        return text
    _RESOLVED.add(text)
    return VariableText(text, value)


def _value_of(found: re.Match[str], key: str) -> str:
    if found[0] == "$${":
        return "${"
    inside = None if found["inside"] is None else _INSIDE.fullmatch(found["inside"])
    where = f"{key}: " if key else ""
    if inside is None:
        raise ConfigError(f"{where}{found[0][:80]!r} is no reference to an environment variable: {_FIX}.")
    value = os.environ.get(inside["name"])
    if inside["has_default"] is not None:
        return value or str(inside["default"])
    if value is None:
        raise ConfigError(
            f"{where}the environment variable {inside['name']} is not set: set it, or give a default, "
            f"${{{inside['name']}:-default}}. A literal ${{ is written $${{."
        )
    return value


def is_of_variable(text: str) -> bool:
    """Return whether a text was read from environment variables."""
    return text in _RESOLVED


def with_references(config: Any) -> Any:
    """Return a configuration to save: references where texts came from variables, and ``$${`` for a literal ``${``.

    Numbers, true, false and null are saved as values, whatever they came from.
    """
    return _map_texts(
        config, lambda text: text.reference if isinstance(text, VariableText) else text.replace("${", "$${")
    )


def with_plain_texts(config: Any) -> Any:
    """Return a configuration without :class:`VariableText`, which not every library takes for text."""
    return _map_texts(config, str.__str__)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Namespace):
        changed = value.clone()
        for name, part in vars(value).items():
            setattr(changed, name, _map_texts(part, change))
        return changed
    if isinstance(value, dict):
        return {name: _map_texts(part, change) for name, part in value.items()}
    if isinstance(value, list):
        return [_map_texts(part, change) for part in value]
    return change(value) if isinstance(value, str) else value


_parsers: Final[Any] = _typehints  # read numbers as YAML, of which PyYAML takes no subclass of str
_load: Final = _parsers.basic_json_or_yaml_load
_parsers.basic_json_or_yaml_load = lambda text: _load(str.__str__(text))
# jsonargparse and Lightning dump configurations by themselves, for --print_config and as hyperparameters; for an option
# of any type jsonargparse warns, with the value, of a serializer that changes the type
yaml.SafeDumper.add_representer(VariableText, lambda dumper, text: dumper.represent_str(text.reference))
register_type(
    VariableText, serializer=lambda text: VariableText(text.reference, text.reference), deserializer=resolve_variables
)
