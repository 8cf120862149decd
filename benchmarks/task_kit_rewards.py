"""Rewards whose mutants ``task_kit_mutants`` makes, with what their authors know of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from rlplug_devkit import RewardConformance, make_prompt, make_sample
from rlplug_rewards.scaling import EnvironmentReward

from benchmarks.task_kit_checks import Subject, kit
from rlplug.interfaces import Reward
from rlplug.types import Prompt, RewardError, Sample

OF_REWARDS: Final = {"weight": 1.0, "name": None}
OF_ANSWERS: Final = {"answer_pattern": None, "finished_only": False, **OF_REWARDS}
"""Documented defaults."""


def prompts_of(*answers: Any, **metadata: Any) -> list[Prompt]:
    """Return a prompt for each answer."""
    return [make_prompt("?", answer, **metadata) for answer in answers]


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
        defaults={"strip": True, "ignore_case": False, **OF_ANSWERS},
        broken_options=[
            ("answer_pattern", lambda each=each: made["ExactMatch"](answer_pattern=each)) for each in ("(", "no group")
        ],
        broken_prompts=prompts_of([], float("nan"), " "),
        expected_notes=[],
    )


def exact_match_of_finished(made: Mapping[str, Any]) -> type:
    cut_off = replace(make_sample("a: 4.", "4"), finish_reason="length")
    return kit(
        RewardConformance,
        make_reward=lambda: made["ExactMatch"](False, True, r"a:(.*)\.", True, 0.5, "exact"),
        samples=[make_sample("a: 4.", " 4"), make_sample("4", "4"), cut_off, make_sample("a:B.", "b")],
        expected=[1.0, 0.0, 0.0, 1.0],
        expected_notes=[],
    )


def regex_format(made: Mapping[str, Any]) -> type:
    texts = ["12", "a 12", "", "1a"]
    return kit(
        RewardConformance,
        make_reward=lambda: made["RegexFormat"](r"\d+"),
        samples=[make_sample(text, "1") for text in texts],
        expected=[1.0, 0.0, 0.0, 0.0],
        defaults={"full_match": True, **OF_REWARDS},
        broken_options=[("RegexFormat.pattern", lambda: made["RegexFormat"]("("))],
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
        defaults=OF_REWARDS,
        broken_options=[
            ("completoin", lambda: made["FunctionReward"](lambda completion, completoin: 0.0)),
            ("prompts", lambda: made["FunctionReward"](lambda prompts=1, completion="": 0.0)),
            ("takes no field", lambda: made["FunctionReward"](lambda: 0.0)),
            ("FunctionReward.function", lambda: made["FunctionReward"](dict)),
        ],
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
        defaults={"choices_key": "choices", **OF_ANSWERS},
        broken_options=[("MultipleChoice.choices_key", lambda: made["MultipleChoice"](choices_key=""))],
        broken_prompts=[
            *prompts_of("E", 4, -1, True, "green", [], 1.5, choices=["sky", "sea", "green", "red"]),
            *prompts_of("Q", 26, choices="no list"),
        ],
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
        defaults={"clip": None, "scale": "none", **OF_REWARDS},
        broken_options=_wrong_scales(made["ScaledReward"]),
    )


def _wrong_scales(scaled: Any) -> list[tuple[str, Callable[[], Any]]]:
    heavy, environment = OfAGroup(weight=2.0), EnvironmentReward()
    clips: list[Any] = [(1.0,), (float("nan"), None), (None, None), (2.0, 1.0), (1.0, 1.0)]
    return [
        ("ScaledReward.scale", lambda: scaled(OfAGroup(), scale="groups")),
        ("ScaledReward.reward", lambda: scaled(heavy, scale="group")),
        ("ScaledReward.reward", lambda: scaled(scaled(OfAGroup(), scale="group"), scale="group")),
        ("ScaledReward.name", lambda: scaled(environment, scale="group", name="other")),
        ("neither clip nor scale", lambda: scaled(OfAGroup())),
        *(("ScaledReward.clip", lambda clip=clip: scaled(OfAGroup(), clip=clip)) for clip in clips),
    ]


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


FUNCTION: Final = {"rlplug.rewards.function": ("_fields_of", "FunctionReward")}
REWARDS: Final = [
    Subject("ExactMatch", {"rlplug_rewards.text": ("ExactMatch",)}, exact_match),
    Subject("ExactMatch as it comes", {"rlplug_rewards.text": ("ExactMatch",)}, exact_match_as_it_comes),
    Subject("ExactMatch of finished ones", {"rlplug_rewards.text": ("ExactMatch",)}, exact_match_of_finished),
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
]
