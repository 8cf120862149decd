"""Calls as records, and the JSON and typed text of which they are made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rlplug.errors import encodable
from rlplug.interfaces.plain_values import json_problem
from rlplug_sandbox.tool_schema import fits

LONGEST_NAME: Final = 128
"""Most characters of a name or an id, which the answer repeats."""

MAX_CALLS: Final = 256
"""Most calls of a turn: a policy that collapses repeats a mark to the end of its turn."""

Parameters: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments of each function, by the function's name."""


@dataclass(frozen=True)
class ToolCall:
    """Call as the policy wrote it; neither name nor arguments are checked against a function.

    Attributes:
        call_id: Id that the answer must repeat, in formats that have one (Mistral's, Kimi's); else empty.
    """

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""


@dataclass(frozen=True)
class MalformedCall:
    """Attempt at a call that cannot be parsed.

    Attributes:
        message: Error message for the policy.
    """

    message: str
    name: str = ""
    call_id: str = ""


AnyCall: TypeAlias = ToolCall | MalformedCall


class Unreadable(Exception):
    """Error of a call that cannot be parsed, with a message for the policy."""


def quoted(text: str) -> str:
    """Return a text of the policy's in quotes, cut and printable."""
    return json.dumps(text[:LONGEST_NAME])


def malformed(message: str, name: str = "", call_id: str = "") -> MalformedCall:
    """Return a malformed call whose name and id are cut and can be encoded."""
    return MalformedCall(message, encodable(name[:LONGEST_NAME]), encodable(call_id[:LONGEST_NAME]))


def checked(name: str, arguments: Any, call_id: str = "", what: str = "the arguments are not an object") -> AnyCall:
    """Return a call, malformed unless its name, id and arguments can be run and answered.

    Args:
        arguments: An object; or its JSON as text, as OpenAI's API has it. Nothing, or an empty text, is no arguments.
        what: What is wrong with arguments of another form.
    """
    safe = malformed("the name or the id is too long, or has half of a surrogate pair", name, call_id)
    if (safe.name, safe.call_id) != (name, call_id):
        return safe
    try:
        arguments = json_object(arguments)
    except Unreadable as error:
        return MalformedCall(str(error), name, call_id)
    if not isinstance(arguments, dict):
        return MalformedCall(what, name, call_id)
    for argument, value in arguments.items():
        if problem := json_problem({argument: value}):
            return MalformedCall(f"the argument {quoted(str(argument))} holds {problem}", name, call_id)
    return ToolCall(name, arguments, call_id)


def json_object(value: Any) -> Any:
    """Return an object out of its JSON, or of nothing; any other value as it is.

    Raises:
        Unreadable: It is text that is not JSON, or has more than one value.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, str):
        return value
    first, *others = json_values(value, 0)
    if others:
        raise Unreadable("the call has more than one value as its arguments")
    return first


# ---- JSON -----------------------------------------------------------------------------------------------------------


def _pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        twice = next(name for index, (name, _) in enumerate(pairs) if any(name == each for each, _ in pairs[:index]))
        raise Unreadable(f"the call is not valid JSON: {quoted(twice)} is given twice")
    return named


def _constant(name: str) -> Any:
    raise Unreadable(f"the call is not valid JSON: {name} is no number")


DECODER: Final = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)


def json_values(text: str, position: int, stops: Sequence[str] = ()) -> Iterator[Any]:
    """Yield the successive JSON values from ``position`` to one of ``stops`` or the end.

    Raises:
        Unreadable: There is none, or something else stands there.
    """
    start, has_value = position, False
    while True:
        while position < len(text) and text[position] in " \t\r\n;":  # Llama 3 puts a semicolon between calls
            position += 1
        if has_value and (position == len(text) or text.startswith(tuple(stops), position)):
            return
        try:
            value, position = DECODER.raw_decode(text, position)
        except Unreadable:
            raise
        except json.JSONDecodeError as error:
            raise Unreadable(f"the call is not valid JSON: {error.msg} at its character {error.pos - start}") from None
        except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of brackets
            raise Unreadable("the call is not JSON of a sensible size") from None
        has_value = True
        yield value


# ---- text with a type -----------------------------------------------------------------------------------------------

PYTHON_NAMES: Final[Mapping[str, Any]] = {"True": True, "False": False, "None": None}


def typed(text: str, schema: Mapping[str, Any] | None) -> Any:
    """Return the value that text stands for, in formats that write all arguments as text.

    Args:
        text: The text, such as ``75001``.
        schema: JSON schema of the argument: where it takes text alone, text is a string. ``None`` if unknown: then what
            reads as JSON is a value, and else it is text.
    """
    if schema is not None and _kinds(schema) == {"string"}:
        return text
    try:
        value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
    except (Unreadable, ValueError, RecursionError):
        name = text.strip()
        value = PYTHON_NAMES.get(name, text)
    if schema is None or fits(value, schema):
        return value
    if isinstance(value, float) and value.is_integer() and fits(int(value), schema):
        return int(value)  # 3.0 is an integer in JSON schema
    return text if fits(text, schema) else value


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    own = schema.get("type", [])
    kinds = {own} if isinstance(own, str) else set(own)
    kinds |= {"null"} if schema.get("nullable") else set()
    return kinds.union(*map(_kinds, schema.get("anyOf", ())))
