"""The plugins of this repository whose mutants ``task_kit_mutants`` makes, with their kits."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rlplug_devkit import DataSourceConformance, EnvironmentConformance, RewardConformance, make_prompt, make_sample
from rlplug_sandbox.tool_environment import ToolEnvironment

from rlplug.data.sources import PromptRow
from rlplug.interfaces import Reward
from rlplug.types import RewardError, Sample

FOLDER: Final = tempfile.TemporaryDirectory(prefix="mutants-")
RECORDS: Final = [{"prompt": f"{index} + 1 =", "answer": str(index + 1), "level": index % 3} for index in range(12)]


@dataclass(frozen=True)
class Subject:
    """A plugin class, and what it calls, whose mutants are made."""

    name: str
    parts: Mapping[str, tuple[str, ...]]
    """Classes, functions and tables by module, those first that others use."""
    checks: Callable[[Mapping[str, Any]], type]
    """Makes the test class, of the classes and functions by name."""


def kit(base: type, deadline_s: float = 30.0, **answers: Any) -> type:
    """Return a test class whose methods return what is given, or what a function of no argument returns."""
    methods = {
        name: value if isinstance(value, int) else lambda self, value=value: value() if callable(value) else value
        for name, value in answers.items()
    }
    return type("Checks", (base,), {"deadline_s": deadline_s, "num_rows": 50, "most_rows": 1000, **methods})


# ---- rewards ------------------------------------------------------------------------------------------------------


def exact_match(made: Mapping[str, Any]) -> type:
    said = [
        ("4", "4"),
        ("5", "4"),
        (" four ", "Four"),
        ("<answer>4</answer>", "4"),
        ("\\boxed{7}", "7"),
        ("12.0", 12),
        ("12.5", 12),
        ("true", True),
        ("x", ["y", "x"]),
        ('{"a": 1}', {"a": 1}),
        ("{", {"a": 1}),
        ("  ", "4"),
    ]
    return kit(
        RewardConformance,
        make_reward=lambda: made["ExactMatch"](ignore_case=True),
        samples=[make_sample(text, answer) for text, answer in said],
        expected=[1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0],
    )


def exact_match_as_it_comes(made: Mapping[str, Any]) -> type:
    said = [("4", "4"), (" 4 ", "4"), ("Four", "four"), ("TRUE", True), (" true", True), ("4", "5")]
    cut_off = replace(make_sample("4", "4"), finish_reason="length")
    return kit(
        RewardConformance,
        make_reward=made["ExactMatch"],
        samples=[*(make_sample(text, answer) for text, answer in said), cut_off],
        expected=[1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0],
    )


def regex_format(made: Mapping[str, Any]) -> type:
    texts = ["12", "a 12", "", "1a"]
    return kit(
        RewardConformance,
        make_reward=lambda: made["RegexFormat"](r"\d+"),
        samples=[make_sample(text, "1") for text in texts],
        expected=[1.0, 0.0, 0.0, 0.0],
    )


def function_reward(made: Mapping[str, Any]) -> type:
    def close_to(completion: str, answer: str, metadata: dict[str, Any]) -> float:
        return float(completion == answer) - len(completion) / 100 + metadata.get("level", 0)

    texts = ["4", "5", "", "four"]
    return kit(
        RewardConformance,
        make_reward=lambda: made["FunctionReward"](close_to),
        samples=[make_sample(text, "4", level=2) for text in texts],
        expected=[2.99, 1.99, 2.0, 1.96],
    )


def multiple_choice(made: Mapping[str, Any]) -> type:
    said = [
        ("The answer is B.", "B"),
        ("(C)", 1),
        ("C", 2),
        ("\\boxed{sky}", "A. sky"),
        ("A or B", "A"),
        ("b", "b"),
        ("D", ["A", "D"]),
        ("", "A"),
        ("\\boxed{green}", 2.0),
        ("\\boxed{no}", "A"),
    ]
    return kit(
        RewardConformance,
        make_reward=made["MultipleChoice"],
        samples=[make_sample(text, answer, choices=["sky", "sea", "green", "red"]) for text, answer in said],
        expected=[1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0],
    )


def choices_in_an_object(made: Mapping[str, Any]) -> type:
    cut_off = replace(make_sample("\\boxed{B}", "B", options={"text": [1, 2]}), finish_reason="length")
    said = ["A", "B", "D", "\\boxed{2}", "\\boxed{1}"]
    return kit(
        RewardConformance,
        make_reward=lambda: made["MultipleChoice"](choices_key="options"),
        samples=[*(make_sample(text, "B", options={"text": np.array([1, 2])}) for text in said), cut_off],
        expected=[0.0, 1.0, 0.0, 1.0, 0.0, 1.0],
    )


def function_of_all(made: Mapping[str, Any]) -> type:
    def all_fields(**fields: Any) -> float:
        return len(fields) + len(fields["completion"])

    return kit(
        RewardConformance,
        make_reward=lambda: made["FunctionReward"](all_fields),
        samples=[make_sample(text, "4") for text in ("4", "", "four")],
        expected=[6.0, 5.0, 9.0],
    )


def function_of_a_sample(made: Mapping[str, Any]) -> type:
    def of(it: Any) -> float:
        return float(it.completion == it.prompt.answer)

    return kit(
        RewardConformance,
        make_reward=lambda: made["FunctionReward"](of),
        samples=[make_sample(text, "4") for text in ("4", "", "four")],
        expected=[1.0, 0.0, 0.0],
    )


def function_that_needs_an_answer(made: Mapping[str, Any]) -> type:
    def overlap(completion: str, answer: str) -> float:
        return float(len({*completion} & {*answer}))

    return kit(
        RewardConformance,
        make_reward=lambda: made["FunctionReward"](overlap),
        samples=[make_sample(text, "abc") for text in ("abd", "", "xc")],
        expected=[2.0, 0.0, 1.0],
    )


class OfAGroup(Reward):
    """Lengths less the shortest of the prompt's, and 1 for the answer, without which it raises."""

    compares_group = True
    needs_answer = True

    def place(self, device: Any) -> None:
        self.device = device

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        assert self.device is not None
        lengths = [len(sample.completion) for sample in samples]
        right = [sample.completion == sample.prompt.answer.strip() for sample in samples]
        return [float(length - min(lengths) + is_right) for length, is_right in zip(lengths, right, strict=True)]


def scaled_group(made: Mapping[str, Any]) -> type:
    return kit(
        RewardConformance,
        make_reward=lambda: made["ScaledReward"](OfAGroup(), clip=(None, 8.0)),
        samples=[make_sample("a" * length, "aa") for length in (0, 2, 20)],
        expected=[0.0, 3.0, 20.0],
        expected_scaled=[[0.0, 3.0, 8.0], [1.0, 8.0, 8.0]],
    )


def scaled_pairs(made: Mapping[str, Any]) -> type:
    return kit(
        RewardConformance,
        make_reward=lambda: made["ScaledReward"](OfAGroup(), scale="group"),
        samples=[make_sample("a" * length, "aa") for length in (0, 2)],
        expected=[0.0, 3.0],
        expected_scaled=[[-0.7071068, 0.7071068]] * 2,
    )


def scaled_reward(kind: str, scaled: list[list[float]]) -> Callable[[Mapping[str, Any]], type]:
    from rlplug.rewards.function import FunctionReward

    def longest(completion: str, answer: str) -> float:
        return float(len(completion)) - float(completion == answer)

    def checks(made: Mapping[str, Any]) -> type:
        return kit(
            RewardConformance,
            make_reward=lambda: made["ScaledReward"](FunctionReward(longest), clip=(1.0, 8.0), scale=kind, weight=0.5),
            samples=[make_sample("a" * length, "aaa") for length in (0, 3, 6, 12)],
            expected=[0.0, 2.0, 6.0, 12.0],
            expected_scaled=scaled,
        )

    return checks


# of 1, 2, 6, 8 and then 1, 8, 8, 8: less their mean over their deviation, and over the deviation of all so far
BY_GROUP: Final = [[-0.9836449, -0.6809849, 0.5296549, 1.134975], [-1.5, 0.5, 0.5, 0.5]]
RUNNING: Final = [[0.3026600, 0.6053199, 1.815960, 2.421280], [0.3005372, 2.404297, 2.404297, 2.404297]]

# ---- environments -------------------------------------------------------------------------------------------------


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
    )


def tools(made: Mapping[str, Any]) -> type:
    return type("Checks", (_tools(made),), {"expected": lambda _: _told_by_tools()})


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
    # tools answer alike, whatever the task
    return type("Checks", (checks,), {"test_the_task_decides_the_answers": lambda _: None})


@functools.cache
def _told_by_tools() -> list[Any]:
    """Return what the environment without a change answers, as an author writes it down."""
    checks = _tools({"ToolEnvironment": ToolEnvironment})()
    return [checks._trajectory(prompt, checks.turns()).told for prompt in checks.prompts()]


# ---- sources ------------------------------------------------------------------------------------------------------


def _path(name: str, text: str) -> str:
    path = Path(FOLDER.name) / name
    if not path.exists():
        path.write_text(text)
    return str(path)


def _jsonl() -> str:
    return _path("train.jsonl", "".join(json.dumps(record) + "\n" for record in RECORDS))


def file_source(made: Mapping[str, Any]) -> type:
    return kit(
        DataSourceConformance,
        make_source=lambda: made["FileSource"](_jsonl(), limit=10),
        make_broken_source=lambda: made["FileSource"]("gone.jsonl"),
        expected=_rows_of_file()[:10],
    )


def _rows_of_file() -> list[PromptRow]:
    return [
        PromptRow(f"train.jsonl:{number}", record["prompt"], record["answer"], {"level": record["level"]})
        for number, record in enumerate(RECORDS, start=1)
    ]


def templates(made: Mapping[str, Any]) -> type:
    records = [{"q": f"{n}?", "choices": ["sky", "sea"], "reward": {"truth": n}, "kept": n} for n in range(9)]
    path = _path("choices.json", json.dumps(records))
    return kit(
        DataSourceConformance,
        make_source=lambda: made["FileSource"](
            path,
            answer_key="reward.truth",
            columns={"q": "question"},
            template="{question} {{}}\n{choices:letters}",
            system_prompt="Be brief.",
        ),
        make_broken_source=lambda: made["FileSource"](path, answer_key="reward.gone"),
        expected=[
            PromptRow(
                f"choices.json:{n + 1}",
                [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": f"{n}? {{}}\nA. sky\nB. sea"},
                ],
                n,
                {"choices": ["sky", "sea"], "reward": {"truth": n}, "kept": n, "question": f"{n}?"},
            )
            for n in range(9)
        ],
    )


def mixture(made: Mapping[str, Any]) -> type:
    from rlplug_data.mixture import WeightedSource

    from rlplug.data.sources import FileSource

    def of(path: str) -> Any:
        parts = {"few": (FileSource(path, limit=3), 2.0), "many": (FileSource(path, limit=9), 1.0)}
        return made["MixtureSource"]({name: WeightedSource(*part) for name, part in parts.items()})

    rows = _rows_of_file()
    expected = [replace(row, uid=f"few/{row.uid}", source="few") for row in rows[:3]]
    expected += [replace(row, uid=f"many/{row.uid}", source="many") for row in rows[:9]]
    made_of = {"make_source": lambda: of(_jsonl()), "make_broken_source": lambda: of("gone.jsonl")}
    return type("Checks", (kit(DataSourceConformance, **made_of, expected=expected),), {"is_part": False})


def curriculum(made: Mapping[str, Any]) -> type:
    from rlplug.data.sources import FileSource

    def of(path: str) -> Any:
        return made["PassRateCurriculum"](FileSource(path))

    return kit(
        DataSourceConformance,
        make_source=lambda: of(_jsonl()),
        make_broken_source=lambda: of("gone.jsonl"),
        expected=_rows_of_file(),
    )


FUNCTION: Final = {"rlplug.rewards.function": ("_fields_of", "FunctionReward")}
FILES: Final = {
    "rlplug.data.record_files": ("_read_jsonl", "_read_json", "_parsed", "_as_object", "READERS", "read_records"),
    "rlplug.data.columns": ("_value_of", "Columns"),
    "rlplug.data.sources": ("FileSource",),
}
SUBJECTS: Final[dict[str, list[Subject]]] = {
    "reward": [
        Subject("ExactMatch", {"rlplug_rewards.text": ("ExactMatch",)}, exact_match),
        Subject("ExactMatch as it comes", {"rlplug_rewards.text": ("ExactMatch",)}, exact_match_as_it_comes),
        Subject("RegexFormat", {"rlplug_rewards.text": ("RegexFormat",)}, regex_format),
        Subject("FunctionReward", FUNCTION, function_reward),
        Subject("FunctionReward of all", FUNCTION, function_of_all),
        Subject("FunctionReward of a sample", FUNCTION, function_of_a_sample),
        Subject("FunctionReward with an answer", FUNCTION, function_that_needs_an_answer),
        Subject("MultipleChoice of objects", {"rlplug_rewards.choice": ("MultipleChoice",)}, choices_in_an_object),
        Subject("ScaledReward of a group", {"rlplug_rewards.scaling": ("clipped", "ScaledReward")}, scaled_group),
        Subject("ScaledReward of pairs", {"rlplug_rewards.scaling": ("group_scaled", "ScaledReward")}, scaled_pairs),
        Subject("MultipleChoice", {"rlplug_rewards.choice": ("MultipleChoice",)}, multiple_choice),
        Subject(
            "ScaledReward by group",
            {"rlplug_rewards.scaling": ("clipped", "group_scaled", "ScaledReward")},
            scaled_reward("group", BY_GROUP),
        ),
        Subject(
            "ScaledReward, running",
            {"rlplug_rewards.scaling": ("RunningSpread", "ScaledReward")},
            scaled_reward("running", RUNNING),
        ),
    ],
    "environment": [
        Subject("HiddenDigit", {"examples.hidden_digit.environment": ("HiddenDigit",)}, hidden_digit),
        Subject("ToolEnvironment", {"rlplug_sandbox.tool_environment": ("_message", "ToolEnvironment")}, tools),
    ],
    "source": [
        Subject("FileSource", FILES, file_source),
        Subject("FileSource with a template", FILES, templates),
        Subject("MixtureSource", {"rlplug_data.mixture": ("MixedPrompts", "MixedRows", "MixtureSource")}, mixture),
        Subject(
            "PassRateCurriculum",
            {"rlplug_data.curriculum": ("CurriculumPrompts", "CurriculumRows", "PassRateCurriculum")},
            curriculum,
        ),
    ],
}
"""Subjects by kind."""
