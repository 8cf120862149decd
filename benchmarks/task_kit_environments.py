"""Environments whose mutants ``task_kit_mutants`` makes, with what their authors know of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, Final

from rlplug_devkit import EnvironmentConformance, make_prompt
from rlplug_sandbox.tool_environment import ToolEnvironment

from benchmarks.task_kit_checks import Subject, kit
from rlplug.rollout.turns.environment_calls import ask_environment

TOOLS: Final = ["examples.calculator.tools.calculate", "benchmarks.task_kit_tools.draw"]
EXCUSED: Final = {"test_the_task_decides_the_answers": "tools answer calls alike, whatever the task"}


def hidden_digit(made: Mapping[str, Any]) -> type:
    return kit(
        EnvironmentConformance,
        make_environment=made["HiddenDigit"],
        prompts=[make_prompt("?", answer="7"), make_prompt("?", answer="2")],
        turns=["5", "no", "3", "7"],
        expected=[
            [("+", -0.1, False), ("?", -0.1, False), ("+", -0.1, False), ("", 1.0, True)],
            [("-", -0.1, False), ("?", -0.1, False), ("-", -0.1, False), ("-", -0.1, False)],
        ],
        expected_metrics=[[{}] * 4] * 2,
        expected_tools=([], []),
        defaults={"guess_cost": 0.1},
    )


def tools(made: Mapping[str, Any]) -> type:
    environment = made["ToolEnvironment"]
    numbers = ("time_limit_s", "memory_limit_mib", "output_limit_chars", "max_processes", "max_calls", "num_workers")
    wrong = [
        *((f"ToolEnvironment.{name}", lambda name=name: environment(TOOLS, **{name: 0})) for name in numbers),
        ("ToolEnvironment.call_format", lambda: environment(TOOLS, "hermez")),
        ("examples.calculator.gone", lambda: environment(["examples.calculator.gone"])),
    ]
    answers = {
        "expected": lambda _: [each.told for each in _played_by_tools()],
        "expected_metrics": lambda _: [[answer.metrics for answer in each.answers] for each in _played_by_tools()],
        "expected_tools": lambda _: ask_environment(lambda: ToolEnvironment(TOOLS, max_calls=7)),
        "broken_options": lambda _: wrong,
        "defaults": {
            "call_format": "auto",
            "time_limit_s": 5.0,
            "memory_limit_mib": 1024,
            "output_limit_chars": 4096,
            "max_processes": 16,
            "max_calls": None,
            "num_workers": None,
        },
    }
    return type("Checks", (_tools(made),), answers)


def waiting_tools(made: Mapping[str, Any]) -> type:
    checks = kit(
        EnvironmentConformance,
        deadline_s=60.0,
        make_environment=lambda: made["ToolEnvironment"](["benchmarks.task_kit_tools.wait"], time_limit_s=600.0),
        turns=[_call("wait", seconds=0.0)],
        endless_turn=_call("wait", seconds=500.0),
    )
    return type("Checks", (checks,), {"excused": EXCUSED})


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _tools(made: Mapping[str, Any]) -> type:
    two = _call("calculate", expression="2 + 2") + _call("calculate", expression="1 / 0")
    draws = _call("draw", most=10**9)
    with_id = '[TOOL_CALLS]calculate[CALL_ID]abcdefghi[ARGS]{"expression": "5 - 1"}'
    checks = kit(
        EnvironmentConformance,
        make_environment=lambda: made["ToolEnvironment"](TOOLS, max_calls=7),
        prompts=[make_prompt("a>"), make_prompt("b>")],
        max_observation_chars=10_000,
        deadline_s=200.0,
        turns=[two, _call("calculator"), "<tool_call>{", _call("calculate", expression="3 * 3"), with_id, draws, two],
    )
    return type("Checks", (checks,), {"excused": EXCUSED})


@functools.cache
def _played_by_tools() -> list[Any]:
    """Return what the environment without a change answers, as an author writes it down."""
    checks = _tools({"ToolEnvironment": ToolEnvironment})()
    return [checks._trajectory(prompt, checks.turns()) for prompt in checks.prompts()]


ENVIRONMENTS: Final = [
    Subject("HiddenDigit", {"examples.hidden_digit.environment": ("HiddenDigit",)}, hidden_digit),
    Subject("ToolEnvironment", {"rlplug_sandbox.tool_environment": ("_message", "ToolEnvironment")}, tools),
    Subject(
        "ToolEnvironment of tools that wait", {"rlplug_sandbox.tool_environment": ("ToolEnvironment",)}, waiting_tools
    ),
]
