"""ToolEnvironment turn by turn, with real calls."""

from __future__ import annotations

import json
import re
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
from rlplug_sandbox import ToolEnvironment
from rlplug_sandbox.sandbox import SandboxError

from examples.calculator.tools import calculate
from rlplug.errors import ConfigError
from rlplug.types import Prompt

SAMPLE = "sample_tools"
DATA = Path(__file__).parents[3] / "examples" / "calculator"


def make(*names, **settings):
    environment = ToolEnvironment([f"{SAMPLE}.{name}" for name in names], **settings)
    environment.reset(Prompt(uid="train.jsonl:0", token_ids=(1,), text="?"), seed=7)
    return environment


def hermes(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_turn_with_calls_gets_their_results_in_order():
    result = make("add", "shout").step("First. " + hermes("add", a=2, b=3) + hermes("shout", length=3))
    assert not result.done
    assert result.observation == [
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "shout", "content": "xxx"},
    ]
    assert result.metrics == {"tool_calls": 2, "malformed_calls": 0, "failed_calls": 0}


def test_a_turn_without_a_call_ends_the_trajectory():
    result = make("add").step("It is 5.")
    assert result.done
    assert result.reward == 0
    assert result.metrics == {"tool_calls": 0, "unread_calls": 0}


def test_what_goes_wrong_is_told_to_the_policy_and_counted():
    text = "<tool_call>{</tool_call>" + "".join(
        [hermes("ad", a=1), hermes("add", a="1"), hermes("fail", message="no such key"), hermes("add", a=1)]
    )
    result = make("add", "fail").step(text)
    contents = [message["content"] for message in result.observation]
    assert contents[0].startswith("Error: the call is not valid JSON")
    assert contents[1] == "Error: there is no function 'ad'. Did you mean 'add'? The functions are add, fail."
    assert contents[2] == "Error: the argument 'a' of add is \"1\": give an integer"
    assert contents[3:] == ["Error: LookupError: no such key", "2"]
    assert result.metrics == {"tool_calls": 5, "malformed_calls": 0.6, "failed_calls": 0.2}
    assert not result.done


def test_mistral_answers_name_the_call():
    result = make("add").step('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]')
    assert result.observation == [{"role": "tool", "name": "add", "content": "2", "tool_call_id": "abcdefghi"}]


def test_a_turn_beyond_max_calls_ends_the_trajectory_and_runs_nothing(tmp_path):
    tmp_path.chmod(0o777)
    environment = make("add", "write", max_calls=2)
    assert not environment.step(hermes("add", a=1) + "<tool_call>{</tool_call>").done
    result = environment.step(hermes("write", path=str(tmp_path / "file"), size=1))
    assert result.done
    assert "at most 2 are allowed (max_calls)" in result.observation[0]["content"]
    assert not (tmp_path / "file").exists()


def test_numbers_that_a_function_draws_depend_on_the_trajectory_and_the_call_alone():
    def drawn(seed):
        environment = make("draw")
        environment.reset(Prompt(uid="train.jsonl:0", token_ids=(1,), text="?"), seed=seed)
        text = hermes("draw") + hermes("draw")
        return [message["content"] for turn in range(2) for message in environment.step(text).observation]

    first = drawn(1)
    assert len(set(first)) == 4
    assert drawn(1) == first
    assert not set(drawn(2)) & set(first)


@pytest.mark.kit
def test_closing_frees_a_call_that_waits_for_a_worker():
    busy, waiting = make("sleep", num_workers=1, time_limit_s=20.0), make("sleep", num_workers=1, time_limit_s=20.0)
    busy.tools()
    errors = []

    def wait():
        try:
            waiting.step(hermes("sleep", seconds=0))
        except SandboxError as error:
            errors.append(str(error))

    first = threading.Thread(target=busy.step, args=(hermes("sleep", seconds=8.0),))
    first.start()
    time.sleep(0.5)
    second = threading.Thread(target=wait)
    second.start()
    time.sleep(0.5)
    assert not errors
    waiting.close()
    second.join(5)
    assert errors == ["The call was cancelled before it began."]
    assert first.is_alive()
    first.join()


@pytest.mark.parametrize(
    "settings",
    [
        {"call_format": "hermess"},
        {"time_limit_s": 0},
        {"memory_limit_mib": -1},
        {"output_limit_chars": 0},
        {"max_processes": 0},
        {"max_calls": 0},
        {"num_workers": 0},
    ],
)
def test_settings_out_of_range_are_named(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=f"ToolEnvironment.{name} is"):
        make("add", **settings)


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(ConfigError, match=r"give one of auto, hermes.*Did you mean 'hermes'"):
        make("add", call_format="hermess")


def test_the_calculator_computes_what_fractions_say():
    environment = ToolEnvironment(["examples.calculator.tools.calculate"])
    (schema,) = environment.tools()
    assert schema["function"]["parameters"]["required"] == ["expression"]
    (message,) = environment.step(hermes("calculate", expression="(17 + 4) * 3 - 2**5")).observation
    assert message["content"] == "31"
    assert Fraction(calculate("7 / 4")) == Fraction(7, 4)
    assert calculate("8 / 4 - -3") == "5"


@pytest.mark.parametrize("expression", ["__import__('os')", "x", "1 if 2 else 3", "'a' * 9", "True + 1", "1 +", ""])
def test_the_calculator_takes_arithmetic_alone(expression):
    with pytest.raises((ValueError, SyntaxError)):
        calculate(expression)


def test_the_calculators_data_agrees_with_its_tool():
    rows = {name: [json.loads(line) for line in (DATA / f"{name}.jsonl").open()] for name in ("train", "val")}
    assert {name: len(split) for name, split in rows.items()} == {"train": 200, "val": 50}
    assert not {row["prompt"] for row in rows["train"]} & {row["prompt"] for row in rows["val"]}
    formulas = 0
    for row in rows["train"] + rows["val"]:
        if found := re.search(r"\d+( [-+*] \d+)+", row["prompt"]):
            formulas += 1
            assert calculate(found[0]) == row["answer"]
    assert formulas > 100
