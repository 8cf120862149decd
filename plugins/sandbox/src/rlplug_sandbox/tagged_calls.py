"""Readers of calls whose arguments are tagged text, which gets its type from the function's JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeAlias

from rlplug_sandbox.call_records import MAX_CALLS, AnyCall, MalformedCall, Parameters, checked, malformed, quoted, typed

Argument: TypeAlias = tuple[str, str | None, str | None]
"""Name, text and JSON type of an argument: no text when the turn ends within it, no type where the call has none."""

FUNCTION: Final = re.compile(r"<function(?:=|\s+name=)[\"']?(?P<key>[^\n>\"']{1,200})[\"']?\s*>")
FUNCTION_END: Final = re.compile(r"</function>|</(?:\w+:)?tool_call>|<function[= ]|\Z")
PARAMETER: Final = re.compile(r"\s*<param(?:eter)?(?:=|\s+name=)[\"']?(?P<key>[^\n>\"']{1,200})[\"']?\s*>")
PARAMETER_END: Final = re.compile(
    r"</param(?:eter)?>(?=\s*(?:<param(?:eter)?[= ]|</function>|</(?:\w+:)?tool_call>|\Z))"
    r"|(?=<parameter=)|(?=</function>\s*(?:</(?:\w+:)?tool_call>|<function|\Z))"  # Qwen3-Coder leaves tags open
)
INVOKE: Final = re.compile(
    r"<(?P<space>(?:\w+:|｜DSML｜ ?)?)invoke\s+name\s*=\s*[\"']?(?P<key>[^\n>\"']{1,200})[\"']?\s*>"
)
INVOKED: Final = (
    r"\s*<{0}parameter\s+name\s*=\s*[\"']?(?P<key>[^\n>\"']{1,200}?)[\"']?(?:\s+string=\"(?P<text>\w+)\")?\s*>"
)
GLM_CALL: Final = re.compile(r"<(?P<space>(?:ifm\|)?)tool_call>\s*(?P<key>[^\s<{\[]{1,200})\s*(?:<tool_sep>\s*)?")
GLM_ARGUMENT: Final = (
    r"\s*<{0}arg_key>\s*(?P<key>[^<]{0,200}?)\s*</{0}arg_key>\s*(?:<{0}arg_type>.*?</{0}arg_type>\s*)?<{0}arg_value>"
)
K3_CALL: Final = re.compile(r'<\|open\|>call tool="(?P<key>[^"]{0,200})"[^<]{0,200}<\|sep\|>')
K3_ARGUMENT: Final = re.compile(
    r'\s*<\|open\|>argument key="(?P<key>[^"]{0,200})"(?: type="(?P<type>\w+)")?[^<]{0,200}<\|sep\|>'
)
GEMMA_CALL: Final = re.compile(r"(?:<\|tool_call>|<start_function_call>)\s*call:\s*(?P<key>[^\s{]{1,200})\s*")
GEMMA_MARK: Final = re.compile(
    r"(?P<quote><\|\"\|>|<escape>)|<tool_call\|>|<end_function_call>|<\|tool_call>|<start_f|\Z"
)
BARE_KEY: Final = re.compile(r"([{,]\s*)([\w.-]+)\s*:")


def _collected(name: str, arguments: Sequence[Argument], parameters: Parameters) -> AnyCall:
    """Return the call with arguments as text."""
    schemas = parameters.get(name)
    values: dict[str, Any] = {}
    for key, text, kind in arguments:
        if text is None:
            return malformed(f"the argument {quoted(key)} is not closed", name)
        if key in values:
            return malformed(f"the argument {quoted(key)} is given twice", name)
        schema = {"type": kind} if kind else None if schemas is None else schemas.get(key)
        values[key] = typed(text, schema)
    return checked(name, values)


@dataclass(frozen=True)
class Tags:
    """Patterns of what a call consists of, and what belongs between its name and its end, for messages."""

    opening: re.Pattern[str]
    closing: re.Pattern[str]
    end: re.Pattern[str]
    form: str


def _read(text: str, position: int, tags: Tags) -> tuple[list[Argument], int, str]:
    """Return the arguments of a call from ``position`` on, where they end, and what is wrong behind them."""
    arguments: list[Argument] = []
    while (opened := tags.opening.match(text, position)) is not None:
        groups = opened.groupdict()
        kind = {"true": "string", "false": "any"}.get(groups.get("text") or "", groups.get("type"))
        closed = tags.closing.search(text, opened.end())
        position = len(text) if closed is None else closed.end()
        arguments.append((opened["key"].strip(), None if closed is None else text[opened.end() : closed.start()], kind))
    found = tags.end.search(text, position)
    rest = text[position : found.start() if found else len(text)].strip()
    return arguments, position, f"the call has {quoted(rest)} where {tags.form} belongs" if rest else ""


def _calls(
    text: str, beginning: re.Pattern[str], tags_of: Callable[[re.Match[str]], Tags], parameters: Parameters, strip: bool
) -> list[AnyCall]:
    """Return the calls that begin with a pattern, one behind another.

    Args:
        strip: Whether to leave out the line end that templates write on each side of a text; the rest may be code.
    """
    calls: list[AnyCall] = []
    position = 0
    while (call := beginning.search(text, position)) is not None and len(calls) <= MAX_CALLS:
        name = call["key"].strip()
        arguments, position, problem = _read(text, call.end(), tags_of(call))
        if strip:
            arguments = [
                (key, value and value.removeprefix("\n").removesuffix("\n"), kind) for key, value, kind in arguments
            ]
        calls.append(malformed(problem, name) if problem else _collected(name, arguments, parameters))
    return calls


FUNCTION_TAGS: Final = Tags(PARAMETER, PARAMETER_END, FUNCTION_END, "<parameter=name>")
K3_TAGS: Final = Tags(
    K3_ARGUMENT,
    re.compile(r"<\|close\|>argument<\|sep\|>"),
    re.compile(r"<\|close\|>call<\|sep\|>|<\|open\|>call|\Z"),
    "an argument",
)


def _invoke_tags(call: re.Match[str]) -> Tags:
    space = re.escape(call["space"])
    end = re.compile(rf"</{space}invoke>|<{space}invoke\b|\Z")
    opening = re.compile(INVOKED.replace("{0}", space))
    return Tags(opening, re.compile(f"</{space}parameter>"), end, '<parameter name="name">')


def _glm_tags(call: re.Match[str]) -> Tags:
    space = re.escape(call["space"])
    end = re.compile(rf"</{space}tool_call>|<{space}tool_call>|\Z")
    opening = re.compile(GLM_ARGUMENT.replace("{0}", space), re.DOTALL)
    return Tags(opening, re.compile(f"</{space}arg_value>"), end, "<arg_key>")


def read_functions(text: str, parameters: Parameters) -> list[AnyCall]:
    """Read ``<function=f><parameter=x>1</parameter></function>``; Llama's ``<function=f>{"x": 1}</function>`` too."""
    first = FUNCTION.search(text)
    if first is not None and text[first.end() :].lstrip().startswith("{"):
        matches = islice(FUNCTION.finditer(text), MAX_CALLS + 1)
        ends = [(call, FUNCTION_END.search(text, call.end())) for call in matches]
        return [checked(call["key"].strip(), text[call.end() : end.start()]) for call, end in ends if end is not None]
    calls = _calls(text, FUNCTION, lambda _: FUNCTION_TAGS, parameters, strip=True)
    return calls or [MalformedCall("a call must be <function=name>, its parameters, and </function>")]


def read_invokes(text: str, parameters: Parameters) -> list[AnyCall]:
    """Read ``<invoke name="f"><parameter name="x">1</parameter></invoke>``, with a family's prefix in all its tags."""
    calls = _calls(text, INVOKE, _invoke_tags, parameters, strip=True)
    return calls or [MalformedCall('a call must be <invoke name="name">, its parameters, and </invoke>')]


def read_glm(text: str, parameters: Parameters) -> list[AnyCall]:
    """Read ``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``."""
    calls = _calls(text, GLM_CALL, _glm_tags, parameters, strip=False)
    return calls or [MalformedCall("a call must be <tool_call>name, its arguments, and </tool_call>")]


def read_kimi_k3(text: str, parameters: Parameters) -> list[AnyCall]:
    """Read ``<|open|>call tool="f"<|sep|>`` with arguments that have their types, up to ``<|close|>call<|sep|>``."""
    calls = _calls(text, K3_CALL, lambda _: K3_TAGS, parameters, strip=False)
    return calls or [MalformedCall('a call must be <|open|>call tool="name"<|sep|>, its arguments, and its end')]


def read_gemma(text: str, parameters: Parameters) -> list[AnyCall]:
    """Read ``call:f{x:1,y:<|"|>text<|"|>}``: JSON with bare keys, and strings between marks of their own."""
    calls: list[AnyCall] = []
    position = 0
    while (call := GEMMA_CALL.search(text, position)) is not None and len(calls) <= MAX_CALLS:
        pieces: list[str] = []
        position, is_string = call.end(), False
        while True:
            mark = GEMMA_MARK.search(text, position)
            assert mark is not None, "the end of the text is one"
            piece = text[position : mark.start()]
            pieces.append(json.dumps(piece) if is_string else BARE_KEY.sub(r'\1"\2":', piece))
            position, is_string = mark.start(), not is_string
            if not mark["quote"]:
                break
            position = mark.end()
        calls.append(checked(call["key"], "".join(pieces)))
    return calls or [MalformedCall("a call must be call:name{argument:1} and its end")]
