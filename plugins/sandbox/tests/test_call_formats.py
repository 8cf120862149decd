"""Calls as the chat template of each family writes them, and as its models do, are the calls that were meant."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from rlplug_sandbox import tool_calls
from rlplug_sandbox.tool_calls import MalformedCall, ToolCall, count_unread, find_calls, text_before_calls
from rlplug_sandbox.tool_environment import ToolEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from rlplug.types import Prompt

trl = pytest.importorskip(
    "trl", reason="TRL is in rlplug[dev]: it asks for a newer datasets than the oldest that is claimed"
)
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TYPES = {
    "city": {"type": "string"},
    "zip": {"type": "string"},
    "days": {"type": "integer"},
    "late": {"type": "boolean"},
    "hours": {"type": "array", "items": {"type": "number"}},
    "more": {"type": "object"},
    "limit": {"type": "integer", "nullable": True},
}
STOPS = {"type": "object", "properties": {"name": {"type": "string"}, "hours": {"type": "array"}}}
PLANNED = {
    "title": {"type": "string"},
    "item": {"type": "object"},
    "stops": {"anyOf": [{"type": "null"}, {"type": "array", "items": STOPS}]},
    "extra": {"type": "object", "additionalProperties": {"type": "string"}},
    "tags": {"type": ["array", "string"], "items": True},
}


def schema(name, properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "?", "parameters": parameters}}


TOOLS = [schema("weather", TYPES), schema("now", {}), schema("plan", PLANNED)]
ARGUMENTS = {
    "city": 'Paris: "a" <b>\n  x',
    "zip": "75001",
    "days": 3,
    "late": True,
    "hours": [1, 2.5],
    "more": {"k": "v"},
}


def rendered(template, messages, **options):
    return render_jinja_template(
        [messages], chat_template=template, tools=TOOLS, bos_token="", eos_token="", pad_token="", **options
    )[0][0]


@pytest.mark.parametrize(
    ("family", "num_calls"),
    [
        *(("qwen2_5", 2), ("qwen3", 2), ("qwen3_5_think", 2), ("qwen3_6", 2), ("qwen3_vl", 2), ("nemotron_3_super", 2)),
        *(("glm4moe", 2), ("gptoss", 1), ("deepseekv3", 2), ("llama3_1", 1), ("gemma4", 2), ("gemma4_v5", 2)),
        *(("lfm2_v2", 2), ("lfm2_2_5", 2), ("lfm2_2_5_v2", 2), ("muse_glimmer", 2)),
    ],
)
def test_what_a_template_writes_is_what_was_called(family, num_calls):
    """The templates of the families are the oracle: text of a call in them must give the call back, types included."""
    template = (TEMPLATES / f"{family}.jinja").read_text()
    calls = [ToolCall("weather", ARGUMENTS), ToolCall("now", {})][:num_calls]
    as_text = json.dumps if family == "deepseekv3" else lambda arguments: arguments
    messages = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": call.name, "arguments": as_text(call.arguments)}}
                for call in calls
            ],
        },
    ]
    whole, prompt = rendered(template, messages), rendered(template, messages[:1], add_generation_prompt=True)
    begun = next(
        (index for index, pair in enumerate(zip(whole, prompt, strict=False)) if len(set(pair)) > 1), len(prompt)
    )
    turn = whole[begun:].rstrip().removesuffix("<|im_end|>").removesuffix("<|eot_id|>")
    assert find_calls(turn, tools=TOOLS) == calls


ONE = [ToolCall("weather", {"city": "Paris", "days": 3})]
NONE = [ToolCall("now", {})]
JSON = '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}'
LLAMA = JSON.replace("arguments", "parameters")


def m3(text):
    """Return a call with the mark that MiniMax M3 writes in front of each tag; here it is a dollar sign."""
    return text.replace("$", "]<]minimax[>[")


def plamo(name, arguments):
    """Return a request as PLaMo 3's template writes it."""
    parts = {"tool_name": name, "tool_arguments": f"<|plamo:constrain|>json<|plamo:msg|>{arguments}"}
    inner = "".join(f"<|plamo:begin_{key}:plamo|>{text}<|plamo:end_{key}:plamo|>" for key, text in parts.items())
    return f"<|plamo:begin_tool_request:plamo|>{inner}<|plamo:end_tool_request:plamo|>"


@pytest.mark.parametrize(
    ("call_format", "text", "expected"),
    [
        # Qwen3-Coder leaves tags out or open
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>", ONE),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", NONE),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\n    if x:\n\n        y()\n\n</parameter>\n</function>",
            [ToolCall("weather", {"city": "    if x:\n\n        y()\n"})],
        ),
        (
            "qwen3_coder",
            "<function=weather><parameter=limit>None</parameter><parameter=late>False</parameter></function>",
            [ToolCall("weather", {"limit": None, "late": False})],
        ),
        ("qwen3_coder", '<function=weather>{"city": "Paris", "days": 3}</function>', ONE),
        ("qwen3_coder", "<seed:tool_call><function=now></function></seed:tool_call>", NONE),
        # a function that nobody knows: JSON is a value, and the rest is text
        (
            "qwen3_coder",
            "<function=f><parameter=a>1</parameter><parameter=b>x y</parameter></function>",
            [ToolCall("f", {"a": 1, "b": "x y"})],
        ),
        ("glm45", "<tool_call>now\n</tool_call>", NONE),
        ("glm45", "<tool_call>now</tool_call>", NONE),
        (
            "glm45",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
            "<arg_value>3</arg_value></tool_call>",
            ONE,
        ),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>I call to=functions.now<|message|>.<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}',
            ONE,
        ),
        ("gpt_oss", "<|channel|>commentary to=functions.now<|message|><|call|>", NONE),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
            '{"city": "Paris", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            ONE,
        ),
        (
            "invoke",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">'
            'Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n"
            "</｜DSML｜function_calls>",
            ONE,
        ),
        (
            "invoke",
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
            '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
            ONE,
        ),
        ("invoke", '<function_calls><invoke name="now"></invoke></function_calls>', NONE),
        # MiniMax M3: elements within elements, lists of <item>, and text that looks like tags without their mark
        (
            "minimax_m3",
            m3('$<tool_call>\n$<invoke name="weather">$<city>Paris$</city>$<days>3$</days>$</invoke>\n$</tool_call>'),
            ONE,
        ),
        ("minimax_m3", m3('$<tool_call>$<invoke name="now">$</invoke>$<invoke name="now">$</invoke>'), NONE * 2),
        ("minimax_m3", m3('<tool_call>\n$<invoke name="now">$</invoke>$</tool_call>'), NONE),
        (
            "minimax_m3",
            m3(
                '$<tool_call>$<invoke name="weather">$<city>\n<b>\n  x</b> </invoke>\n$</city>$<late>true$</late>'
                "$<hours>$<item>1$</item>$<item>2.5$</item>$</hours>$<more>$<k>v$</k>$</more>$</invoke>$</tool_call>"
            ),
            [
                ToolCall(
                    "weather",
                    {"city": "<b>\n  x</b> </invoke>", "late": True, "hours": [1, 2.5], "more": {"k": "v"}},
                )
            ],
        ),
        (
            "minimax_m3",
            m3(
                '$<tool_call>$<invoke name="plan">$<title>7$</title>$<item>$<item>1$</item>$</item>\n$<stops>\n'
                "$<item>$<name>12$</name>$<hours>[9, 17]$</hours>$</item>\n$<item>$<hours>$</hours>$</item>$</stops>"
                "$<extra>$<a>1$</a>$</extra>$<tags>$<item>1$</item>$</tags>$</invoke>$</tool_call>"
            ),
            [
                ToolCall(
                    "plan",
                    {
                        "title": "7",
                        "item": {"item": 1},
                        "stops": [{"name": "12", "hours": [9, 17]}, {"hours": []}],
                        "extra": {"a": "1"},
                        "tags": [1],
                    },
                )
            ],
        ),
        (
            "minimax_m3",
            m3('$<tool_call>$<invoke name="f">$<a>$<item>1$</item>$<item>x$</item>$</a>$<b>$<c>2$</c>$</b>$</invoke>'),
            [ToolCall("f", {"a": [1, "x"], "b": {"c": 2}})],
        ),
        ("minimax_m3", m3('$<invoke name="plan">$<tags>$</tags>$</invoke>'), [ToolCall("plan", {"tags": ""})]),
        ("minimax_m3", m3('<mm:think>$<invoke name="f">?</mm:think>$<tool_call>$<invoke name="now">$</invoke>'), NONE),
        (
            "plamo3",
            "<|plamo:begin_tool_requests:plamo|>"
            + plamo("weather", '{"city": "Paris", "days": 3}')
            + plamo("now", "{}")
            + "<|plamo:end_tool_requests:plamo|><|plamo:tag|>",
            ONE + NONE,
        ),
        ("plamo3", plamo("now", ""), NONE),
        ("plamo3", plamo("now", "{}").replace("<|plamo:constrain|>json", "").partition("<|plamo:end_tool_a")[0], NONE),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
            '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1'
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            [ToolCall("weather", ONE[0].arguments, "functions.weather:0"), ToolCall("now", {}, "functions.now:1")],
        ),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"'
            '<|sep|>Paris<|close|>argument<|sep|><|open|>argument key="days" type="integer"<|sep|>3<|close|>argument'
            "<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
            ONE,
        ),
        ("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|>", NONE),
        ("lfm2", f"<|tool_call_start|>[{JSON}]<|tool_call_end|>", ONE),
        ("olmo3", '<function_calls>\nweather(city="Paris", days=3)\nnow()\n</function_calls>', ONE + NONE),
        (
            "olmo3",
            "<function_calls>weather(late=true, limit=null)</function_calls>",
            [ToolCall("weather", {"late": True, "limit": None})],
        ),
        (
            "gemma4",
            "<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
            ONE,
        ),
        ("granite", f"<|tool_call|>[{JSON}]", ONE),
        ("granite", f"<|tool_call|>[{JSON}]<|/tool_call|>", ONE),
        ("functools", f"functools[{JSON}]", ONE),
        ("granite_20b", f"<function_call> {JSON}", ONE),
        (
            "cohere",
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": '
            '{"city": "Paris", "days": 3}}]<|END_ACTION|>',
            ONE,
        ),
        ("internlm", f"<|action_start|><|plugin|>{LLAMA}<|action_end|>", ONE),
        ("jamba", f"<tool_calls>[{JSON}]</tool_calls>", ONE),
        ("jamba", f"<tool_calls>\n{JSON}\n{JSON}\n</tool_calls>", ONE * 2),
        ("nemotron", f"<TOOLCALL>[{JSON}]</TOOLCALL>", ONE),
        (
            "apertus",
            '<|tools_prefix|>[{"weather": {"city": "Paris", "days": 3}}, {"now": {}}]<|tools_suffix|>',
            ONE + NONE,
        ),
        ("longcat", f"<longcat_tool_call>{JSON}</longcat_tool_call>", ONE),
        ("gigachat", f"<|function_call|>{JSON}", ONE),
        ("xlam", f"[{JSON}]", ONE),
        # missing arguments, and arguments as text, in any format of JSON
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', NONE),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', NONE),
        ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', NONE),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}', ONE),
        ("hermes", f"<tool_call>{LLAMA}</tool_call>", ONE),
        ("hermes", f'<tool_call>{{"type": "function", "function": {JSON}}}</tool_call>', ONE),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}", [ToolCall("now", {}, "000000000")]),
    ],
)
def test_a_familys_call_is_read_with_and_without_its_name(call_format, text, expected):
    assert find_calls(text, call_format, TOOLS) == expected
    assert find_calls(text, "auto", TOOLS) == expected
    assert find_calls("I shall look. " + text, call_format, TOOLS) == expected or call_format in ("xlam", "pythonic")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>\n<function=weather>\n<parameter=city>\nPar", '"city" is not closed'),
        ("<function=weather><parameter=city>a</parameter><parameter=city>b</parameter></function>", "given twice"),
        ("<function=weather>Paris</function>", '"Paris" where <parameter=name> belongs'),
        ("<tool_call>weather<arg_key>city</arg_key><arg_value>Par", '"city" is not closed'),
        ("<tool_call>weather<arg_value>Paris</arg_value></tool_call>", "where <arg_key> belongs"),
        ('<|channel|>commentary to=functions.weather<|message|>{"city": <|call|>', "not valid JSON"),
        ("<｜tool▁calls▁begin｜>weather", "a call must be"),
        ("<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{", "not valid JSON"),
        ('<|tool_call>call:weather{city:<|"|>Par', "not valid JSON"),
        ("<function_calls>weather(1)</function_calls>", "must be named"),
        ("<|tools_prefix|>[4]<|tools_suffix|>", "must be an object"),
        ('<invoke name="weather">Paris</invoke>', "belongs"),
        (m3('$<invoke name="weather">$<city>Par'), '"city" is not closed'),
        (m3('$<invoke name="weather">$<city>Paris$</invoke>'), '"city" is not closed'),
        (m3('$<invoke name="weather">$<city>a$</city>$<city>b$</city>$</invoke>'), '"city" is given twice'),
        (m3('$<invoke name="weather">$<more>a$<k>v$</k>$</more>$</invoke>'), '"more" has text beside its elements'),
        (m3('$<invoke name="weather">$</city>$</invoke>'), '"city", which is not open'),
        (m3('$<invoke name="weather"><city>Paris</city>$</invoke>'), "belongs"),
        (m3('$<tool_call><invoke name="weather"></invoke>'), "a call must be"),
        (m3('$<invoke name="weather">' + "$<a>" * 200), "more than 100 elements"),
        ("<|plamo:begin_tool_requests:plamo|>", "a call must be"),
        (plamo("weather", '{"city": "Par')[:-90], "not valid JSON"),
        (plamo("weather", "{}")[:70], "a call must be"),
    ],
)
def test_a_familys_broken_call_says_why(text, message):
    (call,) = find_calls(text, tools=TOOLS)
    assert isinstance(call, MalformedCall)
    assert message in call.message


def test_text_before_calls_has_the_calls_of_no_format():
    for text in (
        "<function=now></function>",
        "<|tool_call|>[" + JSON + "]",
        '<minimax:tool_call><invoke name="now">',
        m3('$<tool_call>$<invoke name="now">'),
        "<|plamo:begin_tool_requests:plamo|>" + plamo("now", ""),
    ):
        assert text_before_calls(f"I shall look. {text}") == "I shall look."
    assert text_before_calls("No call.") == "No call."


TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<<(?P<name>\w+)",
            "close": ">>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}


def test_the_tokenizers_own_rules_come_first():
    """A format that only the tokenizer knows; where its rules find none, the known ones are read."""
    turn = 'Look: <<weather {"city": "Paris", "days": 3}>>'
    assert find_calls(turn) == []
    assert find_calls(turn, tools=TOOLS, response_template=TEMPLATE, prefix="?<|assistant|>") == ONE
    assert find_calls(f"<tool_call>{JSON}</tool_call>", tools=TOOLS, response_template=TEMPLATE) == ONE
    (call,) = find_calls("<<weather {>>", tools=TOOLS, response_template=TEMPLATE)
    assert isinstance(call, MalformedCall)
    assert "cannot be parsed" in call.message


def test_a_call_that_nothing_reads_is_said_once(monkeypatch):
    monkeypatch.setattr(tool_calls, "_told", set())
    unread = [
        "<my_tool>add(1)</my_tool>",
        '{"name": "add", "arguments": {"a": 1}}',
        "```tool_code\nadd(a=1)\n```",
        "[TOOL_REQUEST]add[END]",
    ]
    environment = ToolEnvironment(["sample_tools.add"])
    environment.reset(Prompt("p", (1,), "?", None, {}), 0)
    with pytest.warns(UserWarning, match="looks like a tool call"):
        assert environment.step(unread[0]).metrics == {"tool_calls": 0, "unread_calls": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [environment.step(text).metrics["unread_calls"] for text in unread] == [1, 1, 1, 1]
        for text in ("I add 1 and 2.", "<tool>", "```python\nadd(1)\n```", "#include <functional> // add"):
            assert environment.step(text).metrics["unread_calls"] == 0, text


def test_a_named_format_says_which_one_was_written(monkeypatch):
    monkeypatch.setattr(tool_calls, "_told", set())
    with pytest.warns(UserWarning, match="set it to auto or glm45"):
        assert count_unread("<tool_call>now</tool_call>", "kimi_k2", TOOLS, "call_format") == {"unread_calls": 1}
