"""What a policy is told of a function, and the check of its arguments."""

from __future__ import annotations

import json

import pytest
import sample_tools
from rlplug_sandbox import tool_functions
from transformers.utils.chat_template_utils import get_json_schema

from rlplug.data.chat_template import tool_instructions
from rlplug.errors import ConfigError

SAMPLE = "sample_tools"


@pytest.fixture(scope="module")
def paint():
    (tool,) = tool_functions((f"{SAMPLE}.paint",))
    return tool


def test_a_schema_says_what_signature_and_docstring_say():
    (tool,) = tool_functions((f"{SAMPLE}.add",))
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first number."},
                    "b": {"type": "integer", "description": "The second number."},
                },
                "required": ["a"],
            },
            "return": {"type": "integer"},
        },
    }
    assert tool.schema == get_json_schema(sample_tools.add)
    assert (tool.name, tool.path) == ("add", f"{SAMPLE}.add")


@pytest.mark.parametrize(
    "arguments",
    [
        {"colour": "red"},
        {"colour": "blue", "sizes": [1, 2], "scale": 2, "names": {"a": "b"}},
        {"colour": "blue", "sizes": None, "scale": 0.5, "names": None},
        {"colour": "blue", "sizes": []},
    ],
)
def test_arguments_that_fit_pass(paint, arguments):
    assert paint.problem_with(arguments) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "paint lacks the argument 'colour'"),
        ({"color": "red"}, "paint has no argument 'color'. Did you mean 'colour'?"),
        ({"colour": "green"}, 'the argument \'colour\' of paint is "green": give one of "red", "blue"'),
        ({"colour": 1}, "give one of"),
        ({"colour": None}, "is null: give one of"),
        ({"colour": "red", "sizes": 1}, "give an array of which each is an integer or null"),
        ({"colour": "red", "sizes": [1, "2"]}, "give an array"),
        ({"colour": "red", "sizes": [True]}, "give an array"),
        ({"colour": "red", "scale": "2"}, "the argument 'scale' of paint is \"2\": give a number"),
        ({"colour": "red", "scale": True}, "give a number"),
        ({"colour": "red", "scale": None}, "give a number"),
        ({"colour": "red", "names": {"a": 1}}, "give an object"),
        ({"colour": "red", "names": "x" * 500}, "xxx...: give an object"),
    ],
)
def test_arguments_that_do_not_fit_are_explained(paint, arguments, message):
    assert message in paint.problem_with(arguments)


def test_an_integer_is_no_fraction_and_no_truth():
    (add,) = tool_functions((f"{SAMPLE}.add",))
    assert add.problem_with({"a": 3}) is None
    for value in (3.0, True, "3", None, [3]):
        assert "give an integer" in add.problem_with({"a": value})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bare", "no docstring"),
        ("untyped", "missing a type hint"),
        ("pair", "use list instead"),
        ("many", "cannot be passed by name"),
        ("later", "wrap it in a plain function"),
        ("Path", "give a function that is written in Python"),
        ("pain", "Did you mean 'paint'"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused_by_its_name(name, message):
    with pytest.raises(ConfigError, match=rf"ToolEnvironment.functions names '{SAMPLE}.{name}'.*{message}"):
        tool_functions((f"{SAMPLE}.{name}",))


@pytest.mark.parametrize("path", ["no_such_package.tool", "add", "not a path", f"{SAMPLE}.add.deeper"])
def test_a_path_that_names_no_function_is_refused(path):
    with pytest.raises(ConfigError, match=r"ToolEnvironment\.functions names"):
        tool_functions((path,))


def test_no_functions_and_two_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="is empty"):
        tool_functions(())
    with pytest.raises(ConfigError, match="both named add"):
        tool_functions((f"{SAMPLE}.add", f"{SAMPLE}:add"))


def test_instructions_hold_every_schema_as_json():
    schemas = [tool.schema for tool in tool_functions((f"{SAMPLE}.add", f"{SAMPLE}.paint"))]
    text = tool_instructions(schemas)
    listed = text.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in listed] == schemas
    assert "<tool_call>" in text
