"""Readers of calls whose arguments are JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from rlplug_sandbox.call_records import (
    MAX_CALLS,
    AnyCall,
    MalformedCall,
    Parameters,
    Unreadable,
    checked,
    json_values,
    malformed,
    quoted,
)

LLAMA_TAG: Final = "<|python_tag|>"
MISTRAL_MARK: Final = "[TOOL_CALLS]"
MISTRAL_HEAD: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
HARMONY_HEAD: Final = re.compile(
    r"\bto=(?P<name>[^\s<]{1,200})[^<]{0,60}(?:<\|c(?:hannel|onstrain)\|>[^<]{0,60}){0,2}<\|message\|>"
)
HARMONY_ENDS: Final = ("<|call|>", "<|end|>", "<|return|>", "<|start|>")
DEEPSEEK_CALL: Final = re.compile(
    r"<｜tool▁call▁begin｜>(?P<head>[^<]{0,200})<｜tool▁sep｜>(?P<body>.*?)(?=<｜tool▁call▁(?:end|begin)｜>|<｜tool▁calls▁end｜>|\Z)",
    re.DOTALL,
)
DEEPSEEK_FENCE: Final = re.compile(
    r"\s*(?P<name>[^\s`]+)\s*```(?:json)?\s*(?P<arguments>.*?)\s*(?:```\s*)?\Z", re.DOTALL
)
KIMI_CALL: Final = re.compile(
    r"<\|tool_call_begin\|>\s*(?P<id>[^<]{1,200}?)\s*<\|tool_call_argument_begin\|>"
    r"(?P<arguments>.*?)(?=<\|tool_call_(?:end|begin)\|>|<\|tool_calls_section_end\|>|\Z)",
    re.DOTALL,
)
PLAMO_MARK: Final = "<|plamo:begin_tool_request:plamo|>"
PLAMO_CALL: Final = re.compile(
    r"\s*<\|plamo:begin_tool_name:plamo\|>(?P<name>[^<]{1,200})<\|plamo:end_tool_name:plamo\|>\s*"
    r"<\|plamo:begin_tool_arguments:plamo\|>\s*(?:<\|plamo:constrain\|>\w{0,20})?(?:<\|plamo:msg\|>)?"
    r"(?P<arguments>.*?)(?:<\|plamo:end_tool_(?:arguments|requests?):plamo\|>|<\|plamo:tag\|>|\Z)",
    re.DOTALL,
)
PLAMO_FORM: Final = (
    f"a call must be {PLAMO_MARK}<|plamo:begin_tool_name:plamo|>name<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|>{} and its ends"
)

ARGUMENT_KEYS: Final = ("arguments", "parameters", "args")
NAME_KEYS: Final = ("name", "tool_name")
OTHER_KEYS: Final = frozenset({"id", "type", "index", "tool_call_id"})
"""Keys beside a call's name and arguments that mean nothing more."""


def calls_at(text: str, position: int, key: str, stops: Sequence[str] = ()) -> Iterator[AnyCall]:
    """Yield a call for each JSON object from ``position`` on, also within lists; stop after a malformed one.

    Args:
        key: Key of the arguments in this format, for messages; those of other formats are read too.
    """
    try:
        for value in json_values(text, position, stops):
            for item in value if isinstance(value, list) else [value]:
                yield call_of(item, key)
    except Unreadable as error:
        yield MalformedCall(str(error))


def call_of(item: Any, key: str = "arguments") -> AnyCall:
    """Return the call of a JSON object."""
    wanted = f'an object with "name" and "{key}"'
    if isinstance(item, dict) and isinstance(item.get("function"), dict):  # as OpenAI's API has it
        item = {**item["function"], **{name: item[name] for name in OTHER_KEYS & item.keys()}}
    if not isinstance(item, dict):
        return MalformedCall(f"a call must be {wanted}")
    name, call_id = next((item[each] for each in NAME_KEYS if each in item), None), item.get("id")
    call_id = call_id if isinstance(call_id, str) else ""
    if not isinstance(name, str) or not name:
        return malformed(f'a call must be {wanted}: "name" is missing', call_id=call_id)
    given = [each for each in ARGUMENT_KEYS if each in item]
    if not given and (unknown := item.keys() - OTHER_KEYS - set(NAME_KEYS)):
        return malformed(f'a call must be {wanted}: it has {quoted(min(unknown))} instead of "{key}"', name, call_id)
    arguments = item[given[0]] if given else None
    return checked(name, arguments, call_id, f'a call must be {wanted}: "{key}" is not an object')


def marked(opening: str, *stops: str, key: str = "arguments") -> Callable[[str, Parameters], list[AnyCall]]:
    """Return a reader of JSON between an opening mark, at each place where it stands, and one of ``stops``."""

    def read(text: str, parameters: Parameters) -> list[AnyCall]:
        calls: list[AnyCall] = []
        position = text.find(opening)
        while position >= 0 and len(calls) <= MAX_CALLS:
            calls += calls_at(text, position + len(opening), key, [*stops, opening])
            # a mark inside a JSON string is rare, and is parsed as one more call, which is malformed
            position = text.find(opening, position + len(opening))
        return calls

    return read


def read_list(text: str, parameters: Parameters) -> list[AnyCall]:
    """Read a turn that is JSON and nothing else."""
    return list(calls_at(text, 0, "arguments")) if text.lstrip().startswith("[") else []


def read_functools(text: str, parameters: Parameters) -> list[AnyCall]:
    parts = re.split(r"functools(?=\s*\[\s*\{)", text, maxsplit=MAX_CALLS + 1)[1:]
    return [call for part in parts for call in calls_at(part, 0, "arguments", ["<|"])]


def read_llama3(text: str, parameters: Parameters) -> list[AnyCall]:
    _, tag, after = text.partition(LLAMA_TAG)
    if not tag and not text.lstrip().startswith("{"):
        return []
    return list(calls_at(after if tag else text, 0, "parameters"))


def read_mistral(text: str, parameters: Parameters) -> list[AnyCall]:
    calls: list[AnyCall] = []
    for part in text.split(MISTRAL_MARK)[1 : MAX_CALLS + 2]:
        if (head := MISTRAL_HEAD.match(part)) is None:
            calls += calls_at(part, 0, "arguments")
            continue
        name, call_id = head[1], head[2] or ""
        try:
            values = list(json_values(part, head.end()))
        except Unreadable as error:
            calls.append(malformed(str(error), name, call_id))
            continue
        calls += [checked(name, value, call_id) for value in values]
    # Mistral's chat templates need an id of nine letters or digits with every answer
    return [call if call.call_id else replace(call, call_id=f"{index:09d}") for index, call in enumerate(calls)]


def read_apertus(text: str, parameters: Parameters) -> list[AnyCall]:
    """Read objects whose only key is the function's name."""
    try:
        (calls,) = json_values(text.partition("<|tools_prefix|>")[2], 0, ["<|tools_suffix|>"])
    except (Unreadable, ValueError) as error:
        return [MalformedCall(str(error) if isinstance(error, Unreadable) else "calls must be one list")]
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and len(call) == 1 for call in calls):
        return [MalformedCall('each call must be an object such as {"name": {"argument": 1}}')]
    return [checked(name, arguments) for call in calls for name, arguments in call.items()]


def read_harmony(text: str, parameters: Parameters) -> list[AnyCall]:
    """Read the messages with a recipient, wherever the header names it; others are reasoning and answers."""
    calls = []
    for head in islice(HARMONY_HEAD.finditer(text), MAX_CALLS + 1):
        ends = [end for mark in HARMONY_ENDS if (end := text.find(mark, head.end())) >= 0]
        calls.append(checked(head["name"].removeprefix("functions."), text[head.end() : min(ends, default=len(text))]))
    return calls


def read_deepseek(text: str, parameters: Parameters) -> list[AnyCall]:
    """Read DeepSeek V3's calls, with a type, a name and fenced JSON, and V3.1's, with a name and JSON."""
    calls: list[AnyCall] = []
    for call in islice(DEEPSEEK_CALL.finditer(text), MAX_CALLS + 1):
        fenced = DEEPSEEK_FENCE.match(call["body"])
        name, arguments = fenced.group("name", "arguments") if fenced else (call["head"].strip(), call["body"])
        calls.append(checked(name, arguments))
    return calls or [MalformedCall("a call must be <｜tool▁call▁begin｜>name<｜tool▁sep｜>{} and its end")]


def read_kimi(text: str, parameters: Parameters) -> list[AnyCall]:
    """Read Kimi K2's calls, whose id holds the name: ``functions.f:0``."""
    calls: list[AnyCall] = []
    for call in islice(KIMI_CALL.finditer(text), MAX_CALLS + 1):
        name = re.sub(r":\d+\Z", "", call["id"].removeprefix("functions."))
        calls.append(checked(name, call["arguments"], call["id"]))
    return calls or [MalformedCall("a call must be <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{}")]


def read_plamo(text: str, parameters: Parameters) -> list[AnyCall]:
    """Read PLaMo 3's requests, each with a name and JSON between marks of their own."""
    calls: list[AnyCall] = []
    for part in text.split(PLAMO_MARK)[1 : MAX_CALLS + 2]:
        call = PLAMO_CALL.match(part)
        calls.append(checked(call["name"].strip(), call["arguments"]) if call else MalformedCall(PLAMO_FORM))
    return calls or [MalformedCall(PLAMO_FORM)]
