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
    functions = ["examples.calculator.tools.calculate"]
    numbers = ("time_limit_s", "memory_limit_mib", "output_limit_chars", "max_processes", "max_calls", "num_workers")
    wrong = [
        *((f"ToolEnvironment.{name}", lambda name=name: environment(functions, **{name: 0})) for name in numbers),
        ("ToolEnvironment.call_format", lambda: environment(functions, "hermez")),
        ("examples.calculator.gone", lambda: environment(["examples.calculator.gone"])),
    ]
    answers = {
        "expected": lambda _: [each.told for each in _played_by_tools()],
        "expected_metrics": lambda _: [[answer.metrics for answer in each.answers] for each in _played_by_tools()],
        "expected_tools": lambda _: ask_environment(lambda: ToolEnvironment(functions, max_calls=5)),
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


def _tools(made: Mapping[str, Any]) -> type:
    def call(name: str, **arguments: Any) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    two = call("calculate", expression="2 + 2") + call("calculate", expression="1 / 0")
    checks = kit(
        EnvironmentConformance,
        make_environment=lambda: made["ToolEnvironment"](["examples.calculator.tools.calculate"], max_calls=5),
        prompts=[make_prompt("a>"), make_prompt("b>")],
        max_observation_chars=10_000,
        deadline_s=200.0,
        turns=[two, call("calculator"), "<tool_call>{", call("calculate", expression="3 * 3"), two],
    )
    excused = {"test_the_task_decides_the_answers": "tools answer calls alike, whatever the task"}
    return type("Checks", (checks,), {"excused": excused})


@functools.cache
def _played_by_tools() -> list[Any]:
    """Return what the environment without a change answers, as an author writes it down."""
    checks = _tools({"ToolEnvironment": ToolEnvironment})()
    return [checks._trajectory(prompt, checks.turns()) for prompt in checks.prompts()]


ENVIRONMENTS: Final = [
    Subject("HiddenDigit", {"examples.hidden_digit.environment": ("HiddenDigit",)}, hidden_digit),
    Subject("ToolEnvironment", {"rlplug_sandbox.tool_environment": ("_message", "ToolEnvironment")}, tools),
]
