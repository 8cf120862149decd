"""Prompts of verifiers as chat templates take them. It needs no verifiers, whose rows are plain dictionaries."""

from __future__ import annotations

import pytest
from rlplug_envs.hosted.loading import Refusal, prompt_messages

NULLS = dict.fromkeys(("name", "tool_calls", "tool_call_id", "reasoning_content"))
"""Keys that only some messages have, as the columns of a data set give them to all."""
IN_API = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
IN_VERIFIERS = {"id": "a1", "name": "add", "arguments": '{"a": 1, "b": 2}'}
AS_OBJECTS = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


def said(role, content, **others):
    return {**NULLS, "role": role, "content": content, **others}


@pytest.mark.parametrize("call", [IN_API, IN_VERIFIERS, AS_OBJECTS])
def test_tool_calls_are_those_of_an_api_with_arguments_as_objects(call):
    """Arguments as text, null content, parts of text and keys that are null would each break a template."""
    row = {
        "prompt": [
            said("user", [{"type": "text", "text": "Add 1 "}, {"type": "text", "text": "and 2."}]),
            said("assistant", None, reasoning_content="A sum.", tool_calls=[call]),
            said("tool", "3", tool_call_id="a1"),
            said("assistant", "It is 3."),
            said("user", "And 3 more?", name="Ada"),
        ]
    }
    assert prompt_messages(row, 0) == [
        {"role": "user", "content": "Add 1 and 2."},
        {"role": "assistant", "content": None, "reasoning_content": "A sum.", "tool_calls": [AS_OBJECTS]},
        {"role": "tool", "content": "3", "tool_call_id": "a1", "name": "add"},
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": "And 3 more?", "name": "Ada"},
    ]


def test_a_call_without_arguments_has_none_and_text_beside_calls_stays():
    call = {"function": {"name": "now", "arguments": None}}
    [message] = prompt_messages({"prompt": [said("assistant", "I look.", tool_calls=[call])]}, 0)
    calls = [{"type": "function", "function": {"name": "now", "arguments": {}}}]
    assert message == {"role": "assistant", "content": "I look.", "tool_calls": calls}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"function": {"arguments": "{}"}}, "example 7 has a tool call without a name"),
        ("add(1, 2)", "example 7 has a tool call without a name: add"),
        ({"name": "add", "arguments": "{1"}, "a call of add whose arguments are no JSON"),
    ],
)
def test_a_call_that_is_none_is_refused_with_its_example(call, message):
    with pytest.raises(Refusal, match=message):
        prompt_messages({"prompt": [said("assistant", None, tool_calls=[call])]}, 7)
