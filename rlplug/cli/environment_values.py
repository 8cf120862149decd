"""``${NAME}`` in YAML: values from environment variables, which are data and are saved as references."""

from __future__ import annotations

import os
import re
from typing import Any, Final

import yaml
from jsonargparse import Namespace
from jsonargparse.typing import register_type

from rlplug.errors import ConfigError

_FORM: Final = re.compile(r"\$\$\{|\$\{(?P<inside>[^}]*)\}|\$\{")
"""An escaped ``$${``; a reference; or one that does not end."""
_INSIDE: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<has_default>:-(?P<default>.*))?", re.ASCII | re.DOTALL)
_FIX: Final = "write ${NAME} or ${NAME:-default}, and $${ for a literal ${"


class VariableText(str):
    """Text that was read from environment variables, with the references that it came from.

    Attributes:
        reference: Text as the YAML file has it, such as ``${HOME}/data``.
    """

    reference: str

    def __new__(cls, value: str, reference: str) -> VariableText:
        text = super().__new__(cls, value)
        text.reference = reference
        return text

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # str's has the text alone
        return str(self), self.reference


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
    return text if is_escaped_only else VariableText(text, value)


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


def with_references(config: Any) -> Any:
    """Return a configuration to save: references where texts came from variables, and ``$${`` for a literal ``${``.

    Numbers, true, false and null are saved as values, whatever they came from.
    """
    if isinstance(config, Namespace):
        changed = config.clone()
        for name, part in vars(config).items():
            setattr(changed, name, with_references(part))
        return changed
    if isinstance(config, dict):
        return {name: with_references(part) for name, part in config.items()}
    if isinstance(config, list):
        return [with_references(part) for part in config]
    if isinstance(config, VariableText):
        return config.reference
    return config.replace("${", "$${") if isinstance(config, str) else config


def _represent(dumper: yaml.SafeDumper, text: VariableText) -> yaml.Node:
    return dumper.represent_str(text.reference)


# jsonargparse and Lightning dump configurations by themselves, for --print_config and as hyperparameters; for an option
# of any type jsonargparse warns, with the value, of a serializer that changes the type
yaml.SafeDumper.add_representer(VariableText, _represent)
register_type(
    VariableText,
    serializer=lambda text: VariableText(text.reference, text.reference),
    deserializer=resolve_variables,
)
