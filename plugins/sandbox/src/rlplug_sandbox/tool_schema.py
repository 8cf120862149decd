"""JSON schemas of tools, from the signatures and docstrings of functions, and checks of a call's arguments."""

from __future__ import annotations

import inspect
import json
import pkgutil
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from rlplug.errors import ConfigError, did_you_mean

KEY: Final = "ToolEnvironment.functions"
KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
"""Python types of the values of each JSON type; a bool does not count as a number."""


@dataclass(frozen=True)
class ToolFunction:
    """Function that the policy may call.

    Attributes:
        path: Import path.
        name: Name in the policy's calls.
        schema: JSON schema for chat templates: ``{"type": "function", "function": {...}}``.
    """

    path: str
    name: str
    schema: Mapping[str, Any]

    def problem_with(self, arguments: Mapping[str, Any]) -> str | None:
        """Return an error message for the policy if the arguments of a call do not fit the schema, else ``None``."""
        parameters = self.schema["function"]["parameters"]
        properties: dict[str, Any] = parameters["properties"]
        for name in arguments:
            if name not in properties:
                near = did_you_mean(name, properties)
                return f"{self.name} has no argument {name[:100]!r}.{near}{_known(properties)}"
        for name in parameters.get("required", ()):
            if name not in arguments:
                return f"{self.name} lacks the argument {name!r}"
        for name, value in arguments.items():
            if not fits(value, properties[name]):
                wanted = _wanted(properties[name])
                return f"the argument {name!r} of {self.name} is {_brief(value)}: give {wanted}"
        return None


def _known(properties: Mapping[str, Any]) -> str:
    return f" Its arguments are {', '.join(properties)}." if properties else " It takes none."


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:100]}..."


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a JSON value fits a schema of :func:`transformers.utils.get_json_schema`."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    if "enum" in schema and not any(value == choice and type(value) is type(choice) for choice in schema["enum"]):
        return False
    if "type" in schema and not any(_is_of(value, kind) for kind in _kinds(schema)):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(fits(item, schema["items"]) for item in value)
    if isinstance(value, dict) and "additionalProperties" in schema:
        return all(fits(item, schema["additionalProperties"]) for item in value.values())
    return True


def _kinds(schema: Mapping[str, Any]) -> Sequence[str]:
    kinds = schema["type"]
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, KINDS.get(kind, object)) and (kind == "boolean" or not isinstance(value, bool))


def _wanted(schema: Mapping[str, Any]) -> str:
    null = " or null" if schema.get("nullable") else ""
    if "enum" in schema:
        return f"one of {json.dumps(schema['enum'], ensure_ascii=False)[1:-1]}{null}"
    if "anyOf" in schema:
        return f"{' or '.join(_wanted(option) for option in schema['anyOf'])}{null}"
    articles = {kind: "an" if kind[0] in "aio" else "a" for kind in KINDS} | {"null": ""}
    inner = f" of which each is {_wanted(schema['items'])}" if schema.get("items", {}).get("type") else ""
    return " or ".join(f"{articles[kind]} {kind}".strip() for kind in _kinds(schema)) + inner + null


# ---- from functions -------------------------------------------------------------------------------------------------


@lru_cache
def tool_functions(paths: tuple[str, ...]) -> tuple[ToolFunction, ...]:
    """Import functions, and return them with their schemas.

    Args:
        paths: Import paths of the functions. Each needs type hints, a docstring, and in its ``Args:`` a line for every
            parameter. Types are those of JSON (``int``, ``float``, ``str``, ``bool``, ``None``, ``list``, ``dict``,
            ``Any``), ``Literal`` of them, and unions.

    Raises:
        ConfigError: A function cannot be imported or described, or has the name of another.
    """
    if not paths:
        raise ConfigError(f"{KEY} is empty: name at least one function, such as my_package.tools.search.")
    tools: dict[str, ToolFunction] = {}
    for path in paths:
        tool = _describe(path, _import(path))
        if tool.name in tools:
            raise ConfigError(f"{KEY} has {tools[tool.name].path} and {path}, both named {tool.name}: rename one.")
        tools[tool.name] = tool
    return tuple(tools.values())


def _import(path: str) -> Callable[..., Any]:
    try:
        function = pkgutil.resolve_name(path)
    except AttributeError as error:
        module = getattr(error, "obj", None)
        near = did_you_mean(str(error.name), vars(module)) if isinstance(module, ModuleType) else ""
        raise ConfigError(f"{KEY} names {path!r}, and {error}.{near}") from error
    except Exception as error:  # a module's own code may raise anything
        raise ConfigError(
            f"{KEY} names {path!r}, which cannot be imported ({type(error).__name__}: {error}): give the import path "
            "of a function, such as my_package.tools.search."
        ) from error
    if not inspect.isfunction(function):
        raise ConfigError(f"{KEY} names {path!r}, which is {function!r}: give a function that is written in Python.")
    return function


def _describe(path: str, function: Callable[..., Any]) -> ToolFunction:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"{KEY} names {path!r}, which is async or a generator: wrap it in a plain function.")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{KEY} names {path!r}, whose parameter {parameter.name!r} cannot be passed by name: a policy names "
                "all arguments of a call. Drop the *, ** or /."
            )
    try:
        _check_hints(path, function)
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        # an error of transformers may hold two strings with several lines each
        reason = " ".join(" ".join(map(str, error.args)).split())
        raise ConfigError(
            f"{KEY} names {path!r}, which cannot be described to a policy: {reason.rstrip('.!')}. Give it a docstring, "
            "with a line in its Args: for every parameter, and type hints out of int, float, str, bool, None, list, "
            "dict, Any, Literal and unions."
        ) from error
    return ToolFunction(path, schema["function"]["name"], schema)


def _check_hints(path: str, function: Callable[..., Any]) -> None:
    """Refuse types without JSON values: a function would get a list for a tuple, and a string for an Enum."""
    hints = {name: hint for name, hint in typing.get_type_hints(function).items() if name != "return"}
    for name, hint in hints.items():
        for inner in _inner_hints(hint):
            is_enum = isinstance(inner, type) and issubclass(inner, Enum)
            if is_enum or (typing.get_origin(inner) or inner) is tuple:
                raise ConfigError(
                    f"{KEY} names {path!r}, whose parameter {name!r} has the type {inner}, which JSON cannot "
                    f"represent: use {'Literal' if is_enum else 'list'} instead."
                )


def _inner_hints(hint: Any) -> list[Any]:
    arguments = () if typing.get_origin(hint) is typing.Literal else typing.get_args(hint)
    return [hint, *(inner for argument in arguments for inner in _inner_hints(argument))]
