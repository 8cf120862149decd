"""Whatever a policy writes as a call gets an answer that the tokenizer can encode: a result, or what is wrong."""

from __future__ import annotations

import json
import time
import warnings

import pytest
from hostile import characters, json_values
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rlplug_sandbox.sandbox import ToolResult
from rlplug_sandbox.tool_calls import CallFormat, ToolCall, count_unread, find_calls
from rlplug_sandbox.tool_environment import CALL_FORMATS, ToolEnvironment

from rlplug.interfaces.plain_values import json_problem
from rlplug.rollout.turns.step_answer import read_step

pytestmark = pytest.mark.kit

FORMATS: list[CallFormat] = ["hermes", "llama3", "mistral", "pythonic", "qwen3_coder", "glm45", "gpt_oss", "gemma4"]
FORMATS += ["minimax_m3", "plamo3"]
LITERALS = [
    *("b'x'", "{1, 2}", "1j", "...", "{(1, 2): 3}", "{1: 2}", "(1,)", "f'{1}'", "-True", "1 if 2 else 3", "[*a]", "a"),
    *("0x" + "f" * 5000, "9" * 5000, "'\\ud800'", "{'a': 1, 'a': 2}", "1e999", "[" * 300, "-" * 3000 + "1", "{}.x"),
    *("(" * 150 + ")" * 150, "not " * 5000 + "1", "lambda: " * 2000 + "1", "1 +" * 2000 + "1", '"""', "'a' 'b'"),
    *("'\\N{x}'", "1_0", "\0"),
]
NAMES = ["add", "f", "", "a b", "\ud800", "x" * 5000, "add\udc00", "__import__", "1", "añ", "add.b"]


class FakePool:
    """Runs nothing; the arguments must be those that the sandbox can send."""

    def call(self, function, arguments, seed, is_cancelled):
        json.dumps(arguments).encode()
        assert json_problem(arguments) is None
        return ToolResult("3")


@pytest.fixture(scope="module")
def environment():
    environment = ToolEnvironment(["sample_tools.add"])
    environment._pool = FakePool()
    return environment


def call_text(call_format, name, arguments, call_id, literal):
    """Return a call as a policy would write it, more or less."""
    if call_format == "pythonic":
        return f"[{name}(a={literal}, b={arguments!r})]"
    body = json.dumps({"name": name, "arguments": arguments, "parameters": arguments, "id": call_id})
    if call_format == "qwen3_coder":
        return f"<function={name}><parameter=a>{literal}</parameter><parameter=b>{arguments!r}</parameter></function>"
    if call_format == "glm45":
        return f"<tool_call>{name}<arg_key>a</arg_key><arg_value>{json.dumps(arguments)}</arg_value></tool_call>"
    if call_format == "minimax_m3":
        nested = f"<a>{literal}$</a>$<b>$<item>{arguments!r}$</item>$</b>$</invoke>"
        return f'$<tool_call>$<invoke name="{name}">${nested}'.replace("$", "]<]minimax[>[")
    if call_format == "plamo3":
        head = f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
        return f"{head}<|plamo:begin_tool_arguments:plamo|><|plamo:msg|>{json.dumps(arguments)}"
    if call_format == "gpt_oss":
        return f"<|channel|>commentary to=functions.{name}<|message|>{json.dumps(arguments)}<|call|>"
    if call_format == "gemma4":
        return f'<|tool_call>call:{name}{{a:{literal},b:<|"|>{arguments!r}<|"|>}}<tool_call|>'
    if call_format == "mistral":
        return f"[TOOL_CALLS]{name}[CALL_ID]{call_id}[ARGS]{json.dumps(arguments)}"
    return f"<tool_call>{body}</tool_call>" if call_format == "hermes" else f"<|python_tag|>{body}"


def check_answers(environment, text, call_format):
    for call in find_calls(text, call_format):
        for part in (call.name, call.call_id, getattr(call, "message", "")):
            assert json_problem(part) is None
        if isinstance(call, ToolCall):
            assert json_problem(call.arguments) is None
    environment.call_format, environment._num_calls = call_format, 0
    answer = read_step(environment.step(text), lambda messages: "".join(m["content"] for m in messages), 10**7)
    assert answer.text is not None
    answer.text.encode()


@pytest.mark.parametrize("call_format", FORMATS)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(NAMES) | st.text(characters, max_size=6),
    arguments=st.dictionaries(st.sampled_from(["a", "b", SURROGATE := "\ud801"]), json_values, max_size=2)
    | json_values,
    call_id=st.sampled_from(NAMES),
    literal=st.sampled_from(LITERALS),
    cut=st.integers(0, 30),
    extra=st.text(characters, max_size=3),
)
@example(name="add", arguments={"a": float("nan"), "b": 1}, call_id="", literal="1", cut=0, extra="")
def test_every_call_gets_an_answer(environment, call_format, name, arguments, call_id, literal, cut, extra):
    """Generates calls with hostile names, ids and values, cut or continued: an exception would lose the trajectory."""
    text = call_text(call_format, name, arguments, call_id, literal)
    check_answers(environment, text[: len(text) - cut] + extra, call_format)


@pytest.mark.parametrize(
    "part",
    [
        *(
            "<tool_call>",
            "<function=f>",
            "<function=f><parameter=x>",
            "<tool_call>f<arg_key>",
            "<|channel|>commentary to=f",
        ),
        *(
            "<｜tool▁call▁begin｜>",
            "<|tool_call_begin|>",
            '<invoke name="f"><parameter name="x">',
            "<|tool_call>call:f{",
        ),
        *(
            "<|tool_call_start|>[f(",
            "<function_calls>f(",
            "<|channel|>analysis<|message|>",
            "<think>",
            "to=f ",
            "<tool",
        ),
        *(
            "]<]minimax[>[",
            '$<invoke name="f">$<a>'.replace("$", "]<]minimax[>["),
            "<|plamo:begin_tool_request:plamo|>",
        ),
        *('<|open|>call tool="f"<|sep|>', " ", "\n<", "functools[{", '[{"name":"f",'),
    ],
)
def test_a_turn_that_repeats_a_mark_is_read_in_time(part):
    """A policy that collapses repeats one token to the end of its turn: reading it takes no quadratic time."""
    text = part * (50_000 // len(part))
    for call_format in CALL_FORMATS:
        start = time.process_time()
        find_calls(text, call_format)
        assert time.process_time() - start < 5, call_format
    start = time.process_time()
    with warnings.catch_warnings(action="ignore"):
        count_unread(text, "auto", [], "test")
    assert time.process_time() - start < 5


@pytest.mark.parametrize("literal", LITERALS)
def test_every_literal_gets_an_answer(environment, literal):
    check_answers(environment, f"[add(a={literal}, b=1)]", "pythonic")
    check_answers(environment, f"[add(a={literal}, a=1)]", "pythonic")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>', '"a" is given twice'),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no number"),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "half of a surrogate pair"),
        ('<tool_call>{"name": "add\\ud800", "arguments": {}}</tool_call>', "half of a surrogate pair"),
        ("[add(a=b'x')]", "a value of type bytes"),
        ("[add(a=0x" + "f" * 5000 + ")]", "more than 4000 digits"),
        ("[add(a={(1, 2): 3})]", "which is not text"),
    ],
)
def test_the_answer_says_what_is_wrong(text, message):
    (call,) = find_calls(text)
    assert message in call.message
