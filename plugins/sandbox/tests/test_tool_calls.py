"""Calls in text, as each family of models writes them, and as they go wrong."""

from __future__ import annotations

import pytest
from rlplug_sandbox.tool_calls import MalformedCall, ToolCall, find_calls

PARIS = ToolCall("weather", {"city": "Paris"})
ROME = ToolCall("weather", {"city": "Rome"})


@pytest.mark.parametrize(
    ("call_format", "text", "expected"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', [PARIS]),
        ("hermes", 'Let me look.\n<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', [PARIS]),
        (
            "hermes",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
            [PARIS, ROME],
        ),
        # SmolLM2 writes a list
        (
            "hermes",
            '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}, '
            '{"name": "weather", "arguments": {"city": "Rome"}}]</tool_call>',
            [PARIS, ROME],
        ),
        # the closing tag may be what ends generation
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}', [PARIS]),
        (
            "hermes",
            '<tool_call>{"name": "echo", "arguments": {"value": "</tool_call>"}}</tool_call>',
            [ToolCall("echo", {"value": "</tool_call>"})],
        ),
        (
            "hermes",
            "<think>Should I use <tool_call>? Yes.</think>"
            '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>',
            [PARIS],
        ),
        ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS]),
        ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS]),
        (
            "llama3",
            '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; '
            '{"name": "weather", "parameters": {"city": "Rome"}}',
            [PARIS, ROME],
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]',
            [ToolCall("weather", {"city": "Paris"}, "abcdefghi")],
        ),
        (
            "mistral",
            '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
            [ToolCall("weather", {"city": "Paris"}, "000000000"), ToolCall("weather", {"city": "Rome"}, "000000001")],
        ),
        (
            "mistral",
            '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}',
            [ToolCall("weather", {"city": "Paris"}, "abcdefghi")],
        ),
        ("pythonic", "[weather(city='Paris'), weather(city=\"Rome\")]", [PARIS, ROME]),
        ("pythonic", "<|python_start|>[weather(city='Paris')]<|python_end|>", [PARIS]),
        (
            "pythonic",
            "[f(x=[1, -2.5], y={'a': None}, z=True)]",
            [ToolCall("f", {"x": [1, -2.5], "y": {"a": None}, "z": True})],
        ),
    ],
)
def test_calls_are_read_in_their_format_and_recognised_without_its_name(call_format, text, expected):
    assert find_calls(text, call_format) == expected
    assert find_calls(text, "auto") == expected


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 4.",
        "",
        '{"answer": 4}',
        "[1, 2, 3]",
        "[see above](link)",
        "<think>I could write <tool_call>{}</tool_call></think>The answer is 4.",
        "<think>I never stop thinking <tool_call>",
        '{"name": "Paris"}',
    ],
)
def test_text_without_a_call_is_an_answer(text):
    assert find_calls(text) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call></tool_call>", "not valid JSON: Expecting value at its character 0"),
        ("<tool_call> \n</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>', "not valid JSON: Expecting ',' delimiter"),
        ("<tool_call>{'name': 'f'}</tool_call>", "not valid JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', '"name" is missing'),
        ('<tool_call>{"name": "f", "arguments": 4}</tool_call>', '"arguments" is not an object'),
        ('<tool_call>{"name": "f", "arguments": "4"}</tool_call>', '"arguments" is not an object'),
        ('<tool_call>{"name": "f", "arguments": "{} {}"}</tool_call>', "more than one value"),
        ('<tool_call>{"name": "f", "argumets": {"x": 1}}</tool_call>', 'it has "argumets" instead of "arguments"'),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', '"name" is missing'),
        ("<tool_call>4</tool_call>", 'an object with "name" and "arguments"'),
        ("<tool_call>" + "[" * 100_000, "not JSON of a sensible size"),
        ('<tool_call>{"name": "f", "arguments": {"x": ' + "1" * 5000 + "}}", "not JSON of a sensible size"),
        ('{"name": "f", "parameters": {"x": }}', "not valid JSON"),
        ("<|python_tag|>print(1)", "not valid JSON"),
        ("[TOOL_CALLS]f[ARGS]{", "not valid JSON"),
        ("[TOOL_CALLS] [4]", 'an object with "name" and "arguments"'),
        ("[f(1)]", "must be named"),
        ("[f(**x)]", "must be named"),
        ("[f(x=y)]", "plain values"),
        ("[f(x=open('/etc/passwd'))]", "plain values"),
        ("[f(x=1]", "not valid Python"),
        ("[f(x=" + "(" * 10_000, "not valid Python"),
        ("<|python_start|>f(x=1)", "must be a list"),
    ],
)
def test_an_attempt_that_cannot_be_read_says_why(text, message):
    (call,) = find_calls(text)
    assert isinstance(call, MalformedCall)
    assert message in call.message


def test_what_follows_the_json_is_not_overlooked():
    first, second = find_calls('<tool_call>{"name": "f", "arguments": {}}}</tool_call>')
    assert first == ToolCall("f", {})
    assert isinstance(second, MalformedCall)


def test_a_malformed_call_does_not_hide_the_next():
    text = '<tool_call>{"name"</tool_call><tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    first, second = find_calls(text)
    assert isinstance(first, MalformedCall)
    assert second == PARIS


def test_a_named_format_sees_no_other():
    assert find_calls("[f(x=1)]", "hermes") == []
    assert find_calls('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "mistral") == []


def test_every_mistral_call_has_an_id_of_nine_characters():
    for text in ("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{", '[TOOL_CALLS][{"name": "f", "arguments": {}}]'):
        ids = [call.call_id for call in find_calls(text)]
        assert all(len(call_id) == 9 for call_id in ids)
        assert len(set(ids)) == len(ids)
