"""Parser of function calls in a policy's turn, in the formats on which model families were trained.

======== ============================================================ ==================================
format   text                                                         models
======== ============================================================ ==================================
hermes   ``<tool_call>{"name": "f", "arguments": {}}</tool_call>``    Qwen2.5, Qwen3, SmolLM2, Hermes
llama3   ``<|python_tag|>{"name": "f", "parameters": {}}``            Llama 3.1 to 3.3
mistral  ``[TOOL_CALLS][{"name": "f", "arguments": {}}]`` or          Mistral: the second form is that of
         ``[TOOL_CALLS]f[ARGS]{}``                                    newer models
pythonic ``[f(x=1), g(y="a")]``                                       Llama 4
======== ============================================================ ==================================

A turn may hold several calls. Text of a reasoning model before ``</think>`` is ignored.

Whatever a policy writes is a call or a malformed one. Names, ids and arguments are plain JSON that a tokenizer can
encode: no halves of surrogate pairs, no NaN, nothing that JSON has not, nothing given twice.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from rlplug.errors import encodable
from rlplug.interfaces.plain_values import json_problem

CallFormat: TypeAlias = Literal["auto", "hermes", "llama3", "mistral", "pythonic"]

HERMES_OPEN: Final = "<tool_call>"
HERMES_CLOSE: Final = "</tool_call>"
LLAMA_TAG: Final = "<|python_tag|>"
MISTRAL_MARK: Final = "[TOOL_CALLS]"
MISTRAL_HEAD: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
PYTHONIC_START: Final = "<|python_start|>"
PYTHONIC_END: Final = "<|python_end|>"
PYTHONIC_HEAD: Final = re.compile(r"\s*\[\s*[A-Za-z_]\w*\(")

LONGEST_NAME: Final = 128
"""Most characters of a name or an id, which the answer repeats."""
LONGEST_SOURCE: Final = 200_000
"""Most characters of pythonic calls: Python's parser can end the process on what is very long and deep."""
MAX_BRACKETS: Final = 200
"""Most brackets that may be open, and signs in a row, in pythonic calls, for the same reason."""
DEEP: Final = re.compile(rf"(?:[-+~]\s*|not\s+|lambda\s*:\s*|await\s+){{{MAX_BRACKETS}}}")
"""Operators in a row, which Python's parser nests without brackets."""


@dataclass(frozen=True)
class ToolCall:
    """Call as the policy wrote it; neither name nor arguments are checked against a function.

    Attributes:
        call_id: Id that the answer must repeat, in formats that have one (Mistral's); else empty.
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


def find_calls(text: str, call_format: CallFormat = "auto") -> list[AnyCall]:
    """Return the calls in a turn, in order; an empty list when the policy attempted none.

    Args:
        text: Text of the turn, special tokens included.
        call_format: Format of the calls; ``auto`` takes the one whose mark comes first. Llama 3 sometimes omits its
            mark: a turn that is a JSON object with ``name`` and ``parameters`` is a call too.
    """
    text = _without_reasoning(text)
    if call_format == "auto":
        found = _recognise(text)
        if found is None:
            return []
        call_format = found
    return READERS[call_format](text)


def _without_reasoning(text: str) -> str:
    _, end, after = text.rpartition("</think>")
    if end:
        return after
    return text.partition("<think>")[0]  # a turn that ended within its reasoning has no calls


def _recognise(text: str) -> CallFormat | None:
    marks: dict[str, CallFormat] = {
        HERMES_OPEN: "hermes",
        LLAMA_TAG: "llama3",
        MISTRAL_MARK: "mistral",
        PYTHONIC_START: "pythonic",
    }
    positions = {text.find(mark): name for mark, name in marks.items() if mark in text}
    if positions:
        return positions[min(positions)]
    if text.lstrip().startswith("{") and '"name"' in text and '"parameters"' in text:
        return "llama3"
    return "pythonic" if PYTHONIC_HEAD.match(text) else None


# ---- JSON -----------------------------------------------------------------------------------------------------------


class _Unreadable(Exception):
    """Error of a call that cannot be parsed, with a message for the policy."""


def _pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        twice = next(name for index, (name, _) in enumerate(pairs) if any(name == each for each, _ in pairs[:index]))
        raise _Unreadable(f"the call is not valid JSON: {_quoted(twice)} is given twice")
    return named


def _constant(name: str) -> Any:
    raise _Unreadable(f"the call is not valid JSON: {name} is no number")


DECODER: Final = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)


def _quoted(text: str) -> str:
    """Return a text of the policy's in quotes, cut and printable."""
    return json.dumps(text[:LONGEST_NAME])


def _checked(name: str, arguments: Any, call_id: str, what: str) -> AnyCall:
    """Return a call, malformed unless its name, id and arguments can be run and answered; ``what`` are arguments."""
    safe_name, safe_id = encodable(name[:LONGEST_NAME]), encodable(call_id[:LONGEST_NAME])
    if (safe_name, safe_id) != (name, call_id):
        return MalformedCall("the name or the id is too long, or has half of a surrogate pair", safe_name, safe_id)
    if not isinstance(arguments, dict):
        return MalformedCall(what, name, call_id)
    for argument, value in arguments.items():
        if problem := json_problem({argument: value}):
            return MalformedCall(f"the argument {_quoted(str(argument))} holds {problem}", name, call_id)
    return ToolCall(name, arguments, call_id)


def _values(text: str, position: int, stops: Sequence[str] = ()) -> Iterator[Any]:
    """Yield the successive JSON values from ``position`` to one of ``stops`` or the end."""
    start, has_value = position, False
    while True:
        while position < len(text) and text[position] in " \t\r\n;":  # Llama 3 puts a semicolon between calls
            position += 1
        if has_value and (position == len(text) or text.startswith(tuple(stops), position)):
            return
        try:
            value, position = DECODER.raw_decode(text, position)
        except _Unreadable:
            raise
        except json.JSONDecodeError as error:
            raise _Unreadable(f"the call is not valid JSON: {error.msg} at its character {error.pos - start}") from None
        except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of brackets
            raise _Unreadable("the call is not JSON of a sensible size") from None
        has_value = True
        yield value


def _calls(text: str, position: int, keys: Sequence[str], stops: Sequence[str] = ()) -> Iterator[AnyCall]:
    """Yield a call for each JSON object from ``position`` on, also within lists; stop after a malformed one."""
    try:
        for value in _values(text, position, stops):
            for item in value if isinstance(value, list) else [value]:
                yield _call(item, keys)
    except _Unreadable as error:
        yield MalformedCall(str(error))


def _call(item: Any, keys: Sequence[str]) -> AnyCall:
    wanted = f'an object with "name" and "{keys[0]}"'
    if not isinstance(item, dict):
        return MalformedCall(f"a call must be {wanted}")
    name, call_id = item.get("name"), item.get("id")
    call_id = call_id if isinstance(call_id, str) else ""
    if not isinstance(name, str) or not name:
        safe_id = encodable(call_id[:LONGEST_NAME])
        return MalformedCall(f'a call must be {wanted}: "name" is missing', call_id=safe_id)
    arguments = next((item[key] for key in keys if key in item), None)
    return _checked(name, arguments, call_id, f'a call must be {wanted}: "{keys[0]}" is not an object')


def _read_hermes(text: str) -> list[AnyCall]:
    calls: list[AnyCall] = []
    position = text.find(HERMES_OPEN)
    while position >= 0:
        calls += _calls(text, position + len(HERMES_OPEN), ["arguments"], [HERMES_CLOSE, HERMES_OPEN])
        # a tag inside a JSON string is rare, and is parsed as one more call, which is malformed
        position = text.find(HERMES_OPEN, position + len(HERMES_OPEN))
    return calls


def _read_llama3(text: str) -> list[AnyCall]:
    _, tag, after = text.partition(LLAMA_TAG)
    if not tag and not text.lstrip().startswith("{"):
        return []
    return list(_calls(after if tag else text, 0, ["parameters", "arguments"]))


def _read_mistral(text: str) -> list[AnyCall]:
    calls: list[AnyCall] = []
    for part in text.split(MISTRAL_MARK)[1:]:
        if (head := MISTRAL_HEAD.match(part)) is None:
            calls += _calls(part, 0, ["arguments"])
            continue
        name, call_id = head[1], head[2] or ""
        try:
            values = list(_values(part, head.end()))
        except _Unreadable as error:
            calls.append(MalformedCall(str(error), encodable(name[:LONGEST_NAME]), call_id[:LONGEST_NAME]))
            continue
        calls += [_checked(name, value, call_id, "the arguments are not an object") for value in values]
    # Mistral's chat templates need an id of nine letters or digits with every answer
    return [call if call.call_id else replace(call, call_id=f"{index:09d}") for index, call in enumerate(calls)]


# ---- Python ---------------------------------------------------------------------------------------------------------


def _read_pythonic(text: str) -> list[AnyCall]:
    _, mark, after = text.partition(PYTHONIC_START)
    if not mark and not PYTHONIC_HEAD.match(text):
        return []
    source = (after if mark else text).partition(PYTHONIC_END)[0].strip()
    if len(source) > LONGEST_SOURCE or DEEP.search(source) or _depth(source) > MAX_BRACKETS:
        return [MalformedCall("the calls are not valid Python of a sensible size")]
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return [MalformedCall(f"the calls are not valid Python: {encodable(getattr(error, 'msg', 'too deep'))[:500]}")]
    if not isinstance(tree, ast.List):
        return [MalformedCall("calls must be a list, such as [name(argument=1)]")]
    return [_python_call(node) for node in tree.elts]


def _depth(source: str) -> int:
    """Return how many brackets are open at most, those in strings included."""
    depth = deepest = 0
    for character in source:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _python_call(node: ast.expr) -> AnyCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return MalformedCall("a call must be of the form name(argument=1)")
    name = node.func.id
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return MalformedCall("arguments must be named, as in name(argument=1)", encodable(name[:LONGEST_NAME]))
    names = [str(keyword.arg) for keyword in node.keywords]
    if len(set(names)) < len(names):
        return MalformedCall("an argument is given twice", encodable(name[:LONGEST_NAME]))
    try:
        arguments = {name: ast.literal_eval(keyword.value) for name, keyword in zip(names, node.keywords, strict=True)}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        message = "arguments must be plain values: numbers, strings, True, False, None, lists, dicts"
        return MalformedCall(message, encodable(name[:LONGEST_NAME]))
    return _checked(name, arguments, "", "")


READERS: Final[Mapping[str, Callable[[str], list[AnyCall]]]] = {
    "hermes": _read_hermes,
    "llama3": _read_llama3,
    "mistral": _read_mistral,
    "pythonic": _read_pythonic,
}
