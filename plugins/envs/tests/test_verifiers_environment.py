from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rlplug_envs.processes import EnvironmentFailure
from rlplug_envs.verifiers_environment import VerifiersEnvironment
from rlplug_envs.verifiers_source import VerifiersSource

from rlplug.data.sources import PromptRow
from rlplug.errors import ConfigError
from rlplug.interfaces.environment import StepResult
from rlplug.types import Prompt

pytest.importorskip("verifiers", reason="the package verifiers is not installed")

HERE = Path(__file__).parent
CASES = "verifiers-cases"


@pytest.fixture(scope="module", autouse=True)
def importable_cases():
    sys.path.insert(0, str(HERE))
    yield
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def rows(importable_cases) -> dict[str, list[PromptRow]]:
    """The examples of every environment in the group, by its name."""
    found: dict[str, list[PromptRow]] = {}
    for row in VerifiersSource(CASES).rows():
        info = row.metadata["example"]["info"]
        name = (json.loads(info) if isinstance(info, str) else info)["env_id"]
        found.setdefault(name, []).append(row)
    return found


def as_prompt(row: PromptRow) -> Prompt:
    return Prompt(row.uid, (), "", row.answer, row.metadata)


def make(**options: Any) -> VerifiersEnvironment:
    return VerifiersEnvironment(CASES, **{"num_processes": 1, "stall_timeout_s": 5.0, **options})


async def play(row: PromptRow, turns: Sequence[str], **options: Any) -> list[StepResult]:
    environment = make(**options)
    try:
        await environment.reset(as_prompt(row), seed=0)
        return [await environment.step(turn) for turn in turns]
    finally:
        environment.close()


def run(row: PromptRow, turns: Sequence[str], **options: Any) -> list[StepResult]:
    return asyncio.run(asyncio.wait_for(play(row, turns, **options), timeout=120))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def api_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# what the policy writes, and the same as an API that parses calls of tools would give it to verifiers
SCRIPTS: dict[str, tuple[str, list[str], list[dict[str, Any]]]] = {
    "right": ("single", ["Paris"], [{"content": "Paris"}]),
    "wrong": ("single", ["Lyon"], [{"content": "Lyon"}]),
    "guessed": ("dialog", ["3", "8", "6"], [{"content": "3"}, {"content": "8"}, {"content": "6"}]),
    "not guessed": ("dialog", ["1", "2", "3", "4"], [{"content": str(guess)} for guess in (1, 2, 3, 4)]),
    "tool": (
        "tools",
        ["I shall add." + call("add", a=20, b=22), "It is 42."],
        [
            {"content": "I shall add.", "tool_calls": [api_call("call00000", "add", '{"a": 20, "b": 22}')]},
            {"content": "It is 42."},
        ],
    ),
    "two calls, one to no tool": (
        "tools",
        [call("add", a=1, b=2) + call("subtract", a=1, b=2), "No idea."],
        [
            {
                "content": "",
                "tool_calls": [
                    api_call("call00000", "add", '{"a": 1, "b": 2}'),
                    api_call("call00001", "subtract", '{"a": 1, "b": 2}'),
                ],
            },
            {"content": "No idea."},
        ],
    ),
    "stateful": (
        "stateful",
        [call("put", thing="cup"), call("put", thing="jug"), "Done."],
        [
            {"content": "", "tool_calls": [api_call("call00000", "put", '{"thing": "cup"}')]},
            {"content": "", "tool_calls": [api_call("call00001", "put", '{"thing": "jug"}')]},
            {"content": "Done."},
        ],
    ),
    "number": ("raises", ["7"], [{"content": "7"}]),
}


@pytest.fixture(scope="module")
def oracle(rows) -> dict[str, Any]:
    """What verifiers itself makes of the scripts."""
    job = {
        "environment": CASES,
        "arguments": {},
        "rollouts": [
            {"example": rows[name][0].metadata["example"], "completions": completions}
            for name, _, completions in SCRIPTS.values()
        ],
    }
    done = subprocess.run(
        [sys.executable, HERE / "verifiers_oracle.py"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return dict(zip(SCRIPTS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_trajectory_gets_the_observations_reward_and_metrics_that_verifiers_gives(script, rows, oracle):
    name, turns, _ = SCRIPTS[script]
    results = run(rows[name][0], turns)
    assert [result.done for result in results] == [False] * (len(turns) - 1) + [True]
    assert sum(result.reward for result in results) == pytest.approx(oracle[script]["reward"])
    assert results[-1].metrics == pytest.approx(oracle[script]["metrics"])
    observed = [message for result in results for message in result.observation]
    expected = [message for message in oracle[script]["completion"] if message["role"] in ("user", "tool")]
    expected = [message for message in expected if message["content"] != "Right."]  # after the last turn
    assert [(m["role"], m["content"]) for m in observed] == [(m["role"], m["content"]) for m in expected]


def test_the_oracle_rewards_what_is_right(oracle):
    assert [round(oracle[name]["reward"], 2) for name in SCRIPTS] == [1.05, 0.04, 0.33, 0.0, 1.0, 0.0, 2.0, 7.0]


def test_results_of_tools_name_the_tool_and_the_call(rows):
    [first] = run(rows["tools"][0], [call("add", a=20, b=22)])
    assert first.observation == [{"role": "tool", "content": "42", "tool_call_id": "call00000", "name": "add"}]


def test_a_call_that_cannot_be_read_is_answered_by_the_environment(rows):
    first, last = run(rows["tools"][0], ['<tool_call>{"name": "add", </tool_call>', "42"])
    assert first.observation[0]["role"] == "tool"
    assert not first.done
    assert last.reward == 1.0


def test_calls_that_a_model_only_thinks_of_are_text(rows):
    [only] = run(rows["tools"][0], ["<think>" + call("add", a=1, b=1) + "</think>42"])
    assert only.done
    assert only.reward == 1.0


def test_tools_are_described_without_what_the_environment_fills_in():
    described = {tool["function"]["name"]: tool["function"]["parameters"] for tool in make().tools()}
    assert set(described) == {"add", "put"}
    assert set(described["add"]["properties"]) == {"a", "b"}
    assert set(described["put"]["properties"]) == {"thing"}


def test_trajectories_side_by_side_do_not_mix(rows):
    secrets = [1 + index % 9 for index in range(40)]

    async def all_of_them() -> list[list[StepResult]]:
        # a different right guess for each, by its own number of turns
        turns = [["1"] * (secret % 3) + ["6"] for secret in secrets]
        return await asyncio.gather(*(play(rows["dialog"][0], each) for each in turns))

    results = asyncio.run(all_of_them())
    assert [result[-1].reward for result in results] == [1 / (secret % 3 + 1) for secret in secrets]


def test_a_reward_function_that_raises_is_an_error_and_no_zero(rows):
    with pytest.raises(EnvironmentFailure, match=r"fragile.*invalid literal.*failed_rewards: zero"):
        run(rows["raises"][0], ["seven"])


def test_a_reward_function_that_raises_counts_as_zero_when_asked_for(rows):
    [only] = run(rows["raises"][0], ["seven"], failed_rewards="zero")
    assert only.done
    assert only.reward == 0.0


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ("fail", "nothing works today"),
        ("rewrite", "rewrites the conversation"),
        ("image", "'image_url': only text"),
    ],
)
def test_an_environment_that_cannot_go_on_costs_its_trajectory(turn, message, rows):
    with pytest.raises(EnvironmentFailure, match=message):
        run(rows["troubles"][0], ["hello", turn])


def test_an_environment_that_adds_to_the_prompt_is_refused(rows):
    with pytest.raises(EnvironmentFailure, match="adds to the prompt"):
        run(rows["troubles"][1], [])


@pytest.mark.parametrize(("turn", "message"), [("hang", "stall_timeout_s"), ("die", "ended with code 3")])
def test_a_process_that_is_lost_costs_its_trajectories_and_is_replaced(turn, message, rows):
    with pytest.raises(EnvironmentFailure, match=message):
        run(rows["troubles"][0], ["hello", turn])
    [only] = run(rows["single"][0], ["Paris"])
    assert only.reward == pytest.approx(1.05)


def test_prompts_of_another_source_are_refused():
    with pytest.raises(ConfigError, match=r"'file:1' is not from the environment 'verifiers-cases'.*VerifiersSource"):
        asyncio.run(make().reset(Prompt("file:1", (), "", None, {}), seed=0))


def test_a_prompt_with_tool_calls_is_the_conversation_that_the_environment_continues():
    """Were the calls of the prompt written otherwise than verifiers has them, it would be a rewritten conversation."""
    [row] = VerifiersSource(CASES, {"kind": "asked"}).rows()
    turns = ["Once more." + call("add", a=3, b=3), "It is 6."]
    tool, answer = run(row, turns, arguments={"kind": "asked"})
    assert [message["content"] for message in tool.observation] == ["6"]
    assert (answer.done, answer.reward) == (True, 1.0)
