"""Parser of tool calls in a policy's turn, in the formats on which model families were trained.

================== =================================================================== ================================
format             text                                                                models
================== =================================================================== ================================
hermes             ``<tool_call>{"name": "f", "arguments": {}}</tool_call>``           Qwen2.5, Qwen3, SmolLM, Granite 4
qwen3_coder        ``<function=f><parameter=x>1</parameter></function>``               Qwen3-Coder, Qwen3.5, Nemotron 3,
                                                                                       Seed-OSS, MiMo, Step 3.5
glm45              ``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value>...``     GLM 4.5 to 5, Ling, Hunyuan 3
gpt_oss            ``<|channel|>commentary to=functions.f<|message|>{}<|call|>``       gpt-oss
deepseek_v3        ``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>``        DeepSeek V3, R1, V3.1
invoke             ``<invoke name="f"><parameter name="x">1</parameter></invoke>``     MiniMax M2, DeepSeek V3.2 and V4
minimax_m3         ``]<]minimax[>[<invoke name="f">]<]minimax[>[<x>1...``              MiniMax M3
kimi_k2            ``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}``  Kimi K2
kimi_k3            ``<|open|>call tool="f"<|sep|>...<|close|>call<|sep|>``             Kimi K3
plamo3             ``<|plamo:begin_tool_name:plamo|>f...``                             PLaMo 3
llama3             ``<|python_tag|>{"name": "f", "parameters": {}}``                   Llama 3.1 to 3.3
mistral            ``[TOOL_CALLS][{"name": "f", "arguments": {}}]``, newer models      Mistral
                   ``[TOOL_CALLS]f[ARGS]{}``
pythonic           ``[f(x=1), g(y="a")]``                                              Llama 4
lfm2               ``<|tool_call_start|>[f(x=1)]<|tool_call_end|>``                    LFM2
olmo3              ``<function_calls>f(x=1)</function_calls>``, a call a line          OLMo 3
gemma4             ``<|tool_call>call:f{x:1}<tool_call|>``                             Gemma 4, FunctionGemma
granite            ``<|tool_call|>[{"name": "f", "arguments": {}}]``                   Granite 3, Phi-4-mini
functools          ``functools[{"name": "f", "arguments": {}}]``                       Phi-4-mini
granite_20b        ``<function_call>{"name": "f", "arguments": {}}``                   Granite 20B
cohere             ``<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]``          Command A
internlm           ``<|action_start|><|plugin|>{"name": "f", "parameters": {}}``       InternLM2
jamba              ``<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>``       Jamba, Hunyuan A13B, MiniMax M1
nemotron           ``<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>``           Llama-Nemotron
apertus            ``<|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|>``               Apertus
longcat            ``<longcat_tool_call>{"name": "f", "arguments": {}}``               LongCat
gigachat           ``<|function_call|>{"name": "f", "arguments": {}}``                 GigaChat 3
xlam               ``[{"name": "f", "arguments": {}}]`` alone                          xLAM
================== =================================================================== ================================

A turn may hold several calls. Reasoning in front of them is ignored. A call without arguments has none, and arguments
that are JSON within text are what that JSON says. Text of formats without types gets its type from the function's
schema.

Whatever a policy writes is a call or a malformed one. Names, ids and arguments are plain JSON that a tokenizer can
encode: no halves of surrogate pairs, no NaN, nothing that JSON has not, nothing given twice.

The rules of the engines' own parsers (``vllm.tool_parsers``) are followed, not imported: a trainer beside servers has
no engine in its environment, and they drop what is malformed, which a policy must be told.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from rlplug.errors import describe, encodable
from rlplug_sandbox.call_records import MAX_CALLS, AnyCall, MalformedCall, Parameters, ToolCall, malformed
from rlplug_sandbox.element_calls import read_elements
from rlplug_sandbox.json_calls import (
    call_of,
    marked,
    read_apertus,
    read_deepseek,
    read_functools,
    read_harmony,
    read_kimi,
    read_list,
    read_llama3,
    read_mistral,
    read_plamo,
)
from rlplug_sandbox.python_calls import python_list, read_olmo
from rlplug_sandbox.tagged_calls import read_functions, read_gemma, read_glm, read_invokes, read_kimi_k3

__all__ = ["AnyCall", "CallFormat", "MalformedCall", "ToolCall", "count_unread", "find_calls", "text_before_calls"]

CallFormat: TypeAlias = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "glm45",
    "gpt_oss",
    "deepseek_v3",
    "invoke",
    "minimax_m3",
    "kimi_k2",
    "kimi_k3",
    "plamo3",
    "llama3",
    "mistral",
    "pythonic",
    "lfm2",
    "olmo3",
    "gemma4",
    "granite",
    "functools",
    "granite_20b",
    "cohere",
    "internlm",
    "jamba",
    "nemotron",
    "apertus",
    "longcat",
    "gigachat",
    "xlam",
]

Reader: TypeAlias = Callable[[str, Parameters], list[AnyCall]]

FORMATS: Final[Mapping[CallFormat, tuple[str, Reader]]] = {
    "qwen3_coder": (r"(?:<(?:\w+:)?tool_call>\s*)?<function(?:=|\s+name=)", read_functions),
    "glm45": (r"<(?:ifm\|)?tool_call>\s*[A-Za-z_][\w.-]*\s*(?:<|\Z)", read_glm),
    "minimax_m3": (
        r"(?:<tool_call>\s*)?\]<\]minimax\[>\[\s*<(?:tool_call>|invoke\s+name\s*=)",
        read_elements,
    ),
    "hermes": ("<tool_call>", marked("<tool_call>", "</tool_call>")),
    "gpt_oss": (
        r"(?:<\|channel\|>\w+ )?\bto=(?!(?:self|user)\b)[^\s<]{1,200}[^<]{0,60}"
        r"(?:<\|c(?:hannel|onstrain)\|>[^<]{0,60}){0,2}<\|message\|>(?!\s*<\w)",
        read_harmony,
    ),
    "deepseek_v3": (r"<｜tool▁calls?▁begin｜>", read_deepseek),
    "invoke": (r"(?:<[^<>\n]*(?:calls?|｜)>\s*)?<(?:\w+:|｜DSML｜ ?)?invoke\s+name\s*=", read_invokes),
    "kimi_k2": (r"<\|tool_calls_section_begin\|>|<\|tool_call_begin\|>", read_kimi),
    "kimi_k3": (r'(?:<\|open\|>tools<\|sep\|>\s*)?<\|open\|>call tool="', read_kimi_k3),
    "plamo3": (r"<\|plamo:begin_tool_requests?:plamo\|>", read_plamo),
    "llama3": (r"<\|python_tag\|>|\A(?=\s*\{)(?=.*\"name\")(?=.*\"parameters\")", read_llama3),
    "mistral": (r"\[TOOL_CALLS\]", read_mistral),
    "pythonic": (r"<\|python_start\|>|\A\s*\[\s*[A-Za-z_][\w.]*\(", python_list("<|python_start|>", "<|python_end|>")),
    "lfm2": (r"<\|tool_call_start\|>", python_list("<|tool_call_start|>", "<|tool_call_end|>")),
    "olmo3": (r"<function_calls>(?!\s*<)", read_olmo),
    "gemma4": (r"(?:<\|tool_call>|<start_function_call>)\s*call:", read_gemma),
    "granite": (r"<\|tool_call\|>", marked("<|tool_call|>", "<|/tool_call|>", "</tool_call>", "<|")),
    "functools": (r"functools(?=\s*\[\s*\{)", read_functools),
    "granite_20b": (r"<function_call>", marked("<function_call>", "</function_call>")),
    "cohere": (r"<\|START_ACTION\|>", marked("<|START_ACTION|>", "<|END_ACTION|>", key="parameters")),
    "internlm": (r"<\|action_start\|>", marked("<|plugin|>", "<|action_end|>", key="parameters")),
    "jamba": (r"<tool_calls>", marked("<tool_calls>", "</tool_calls>")),
    "nemotron": (r"<TOOLCALL>", marked("<TOOLCALL>", "</TOOLCALL>")),
    "apertus": (r"<\|tools_prefix\|>", read_apertus),
    "longcat": (r"<longcat_tool_call>", marked("<longcat_tool_call>", "</longcat_tool_call>")),
    "gigachat": (r"<\|function_call\|>", marked("<|function_call|>", "<|message_sep|>")),
    "xlam": (r"\A\s*\[\s*\{\s*\"name\"\s*:(?=.*\"arguments\")", read_list),
}
"""Pattern of what begins a format's calls, and their reader. Where two begin at one place, the first is meant."""
_MARKS: Final = re.compile(
    rf"(?:(?=[<\[\]tf])|\A)(?:{'|'.join(f'(?P<{name}>{mark})' for name, (mark, _) in FORMATS.items())})", re.DOTALL
)
"""All of them, none of which begins within a text with other letters."""

REASONING: Final = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<|plamo:begin_think:plamo|>": "<|plamo:end_think:plamo|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
}
"""Marks around reasoning, in which nothing is a call."""
ANALYSIS: Final = re.compile(
    r"<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>(?:<\|start\|>assistant)?|\Z)", re.DOTALL
)
"""Reasoning of gpt-oss."""

LOOKS_LIKE_CALL: Final = re.compile(
    r"<[/|｜\]\[]{0,9}[\w:|｜▁ ]{0,40}(?:tool|function|invoke|plugin|action)s?(?![a-z])[\w:|｜▁ =\"'.-]{0,80}>"
    r"|\[[A-Z_]{0,20}(?:TOOL|FUNC)[A-Z_]{0,20}\]|```tool\w{0,20}"
    r'|"(?:tool_)?name"\s{0,9}:\s{0,9}"[\w.-]{1,200}"\s{0,9},\s{0,9}"(?:arguments|parameters|args|input)"'
)
"""What calls of formats that nobody here has read yet have in common."""


def find_calls(
    text: str,
    call_format: CallFormat = "auto",
    tools: Sequence[Mapping[str, Any]] = (),
    response_template: Mapping[str, Any] | None = None,
    prefix: str = "",
) -> list[AnyCall]:
    """Return the calls in a turn, in order; an empty list when the policy attempted none.

    Args:
        text: Text of the turn, special tokens included.
        call_format: Format of the calls; ``auto`` takes that of ``response_template``, else the one whose mark comes
            first. Llama 3 sometimes omits its mark: a turn that is a JSON object with ``name`` and ``parameters`` is a
            call too.
        tools: JSON schemas of the functions, from which text gets its type in formats without types.
        response_template: The tokenizer's own rules, with which ``transformers`` parses a turn.
        prefix: Text in front of the turn, which the rules need where the chat template begins the turn.
    """
    problem = None
    if call_format == "auto" and response_template is not None:
        calls = _by_template(text, response_template, prefix, tools)
        if isinstance(calls, list) and calls:
            return calls
        problem = None if isinstance(calls, list) else calls
    text = _without_reasoning(text)
    found = _recognise(text)[0] if call_format == "auto" else call_format
    calls = FORMATS[found][1](text, _parameters(tools)) if found is not None and found != "auto" else []
    if len(calls) > MAX_CALLS:
        calls = [*calls[:MAX_CALLS], MalformedCall(f"a turn may hold {MAX_CALLS} calls, and the others are left out")]
    return calls or ([problem] if problem else [])


def text_before_calls(text: str, call_format: CallFormat = "auto") -> str:
    """Return a turn's text in front of its calls; without a call's mark, all of it."""
    spoken = _without_reasoning(text)
    mark = _MARKS.search(spoken) if call_format == "auto" else re.search(FORMATS[call_format][0], spoken, re.DOTALL)
    return text if mark is None else text[: max(text.rfind(spoken[mark.start() :]), 0)].rstrip()


def _looks_like_call(text: str, call_format: CallFormat, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what looks like a call in a turn in which :func:`find_calls` finds none, or ``None``.

    Args:
        tools: JSON schemas of the functions: only a turn with the name of one can look like a call.
    """
    text = _without_reasoning(text)
    names = list(_parameters(tools))
    if names and not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names):
        return None
    if call_format != "auto" and (other := _recognise(text))[0] is not None:
        return other[1]
    found = LOOKS_LIKE_CALL.search(text)
    return None if found is None else found[0]


_told: set[str] = set()


def count_unread(text: str, call_format: CallFormat, tools: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    """Warn, once for each ``key``, of a turn that looks like a call in a format that is not read.

    Returns:
        The metric ``unread_calls`` of a turn without calls: 1 when it looks like one, else 0.
    """
    mark = _looks_like_call(text, call_format, tools)
    if mark is not None and key not in _told:
        _told.add(key)
        other, _ = _recognise(_without_reasoning(text))
        fix = f"set it to auto or {other}" if other and call_format != "auto" else "it is no format that rlplug knows"
        warnings.warn(
            f"A turn has {encodable(mark[:100])!r}, which looks like a tool call, and {key} {call_format!r} reads none "
            f"there: {fix}. Such turns count as answers without calls; environment/unread_calls has their share.",
            stacklevel=3,
        )
    return {"unread_calls": float(mark is not None)}


def _by_template(
    text: str, template: Mapping[str, Any], prefix: str, tools: Sequence[Mapping[str, Any]]
) -> list[AnyCall] | MalformedCall:
    from transformers.utils.chat_parsing import parse_response

    try:
        message = parse_response(text, dict(template), prefix=prefix, tools=[dict(tool) for tool in tools])
        return [call_of(call) for call in message.get("tool_calls") or []]
    except Exception as error:  # noqa: BLE001 - rules from outside, which raise whatever Python does
        return malformed(f"the call cannot be parsed: {describe(error)[:500]}")


def _parameters(tools: Sequence[Mapping[str, Any]]) -> Parameters:
    functions = [tool.get("function", tool) for tool in tools]
    schemas = {each["name"]: (each.get("parameters") or {}).get("properties") or {} for each in functions}
    return {
        name: {key: each for key, each in own.items() if isinstance(each, Mapping)} for name, own in schemas.items()
    }


def _without_reasoning(text: str) -> str:
    for opening, closing in REASONING.items():
        _, end, after = text.rpartition(closing)
        text = after if end else text.partition(opening)[0]  # a turn that ended within its reasoning has no calls
    return ANALYSIS.sub("", text)


def _recognise(text: str) -> tuple[CallFormat | None, str]:
    """Return the format whose mark comes first in a text, and that mark."""
    mark = _MARKS.search(text)
    return (None, "") if mark is None else (mark.lastgroup, mark[0])  # type: ignore[return-value]
