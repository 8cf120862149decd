"""ExactMatch, RegexFormat and FunctionReward, called as the runner calls them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import subprocess
import sys

import pytest
from jsonargparse import ArgumentParser
from rlplug_rewards.text import ExactMatch, RegexFormat

from rlplug.errors import ConfigError
from rlplug.interfaces.reward import Reward
from rlplug.rewards import FunctionReward
from rlplug.types import RewardError


@pytest.mark.parametrize(
    ("options", "completion", "answer", "expected"),
    [
        ({}, " 4\n", "4", 1.0),
        ({}, "5", "4", 0.0),
        ({}, "4", 4, 1.0),
        ({"strip": False}, " 4", "4", 0.0),
        ({}, "Yes", "yes", 0.0),
        ({"ignore_case": True}, "Yes", "yes", 1.0),
        ({"answer_pattern": r"####\s*(\S+)"}, "#### 3 no, wait #### 4", "4", 1.0),
        ({"answer_pattern": r"####\s*(\S+)"}, "#### 4 no, wait #### 3", "4", 0.0),
        ({"answer_pattern": r"####\s*(\S+)"}, "4", "4", 0.0),
        ({}, "<think>5?</think>4", "4", 1.0),
        ({}, "<think>4", "4", 0.0),
        ({}, "<answer>4</answer>", "4", 1.0),
        ({}, r"so \boxed{4}", "4", 1.0),
        ({}, "4", 4.0, 1.0),
        ({}, "4.00", 4, 1.0),
        ({}, "0.00001", 1e-5, 1.0),
        ({}, "true", True, 1.0),
        ({}, "1", True, 0.0),
        ({}, "paris", ["Paris", "paris"], 1.0),
        ({}, '{"b": 2, "a": 1}', {"a": 1, "b": 2}, 1.0),
        ({}, "nan", "nan", 1.0),
    ],
)
def test_exact_match(make_sample, options, completion, answer, expected):
    assert ExactMatch(**options).score([make_sample(completion, answer)]) == [expected]


def test_exact_match_without_an_answer_is_an_error(make_sample):
    (value,) = ExactMatch().score([make_sample(answer=None)])
    assert isinstance(value, RewardError)
    assert "no answer" in value.message


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"solution": "b"}] * 3, "3 of 3 prompts .*:0. Set answer_key of this source to 'solution'"),
        ([{"level": 3}] * 3, "3 of 3 prompts .*:0. Give them one; beside the prompt they have level"),
        ([{"answer": "b"}, {"anwser": "b"}, {"answer": "b"}], "1 of 3 prompts .*:1. Correct its field 'anwser'"),
        ([{"answer": "b"}, {"answer": "b"}, {}], "1 of 3 prompts .*:2. Give it one, or remove it"),
    ],
)
def test_prompts_without_an_answer_are_refused_where_a_reward_needs_it(make_sample, rows, words):
    """Catches a run that trains on rewards that fail, and advice to change all rows where one is to be mended."""
    prompts = [
        make_sample(answer=row.pop("answer", None), uid=f"train.jsonl:{index}", **row).prompt
        for index, row in enumerate(map(dict, rows))
    ]
    FunctionReward(by_known_name).check_prompts(prompts)
    with pytest.raises(ConfigError, match=words) as caught:
        ExactMatch().check_prompts(prompts)
    assert "exactmatch of model.rewards needs one" in str(caught.value)


def test_exact_match_refuses_nan(make_sample):
    sample = make_sample("nan", float("nan"))
    assert isinstance(ExactMatch().score([sample])[0], RewardError)
    with pytest.raises(ConfigError, match=r"'exactmatch' cannot use the answer of prompt 'train.jsonl:0'"):
        ExactMatch().check_prompts([sample.prompt])


@pytest.mark.parametrize(
    ("pattern", "full_match", "completion", "expected"),
    [
        (r"<answer>\d+</answer>", True, "<answer>4</answer>", 1.0),
        (r"<answer>\d+</answer>", True, "so: <answer>4</answer>", 0.0),
        (r"<answer>\d+</answer>", False, "so: <answer>4</answer>", 1.0),
        (r"<think>.*</think>4", True, "<think>\n</think>4", 0.0),
        (r"(?s)<think>.*</think>4", True, "<think>\n</think>4", 1.0),
    ],
)
def test_regex_format(make_sample, pattern, full_match, completion, expected):
    assert RegexFormat(pattern, full_match).score([make_sample(completion)]) == [expected]


def test_patterns_are_checked_at_construction():
    with pytest.raises(ConfigError, match=r"RegexFormat.pattern is '\(a'.*at position 0"):
        RegexFormat("(a")
    with pytest.raises(ConfigError, match=r"ExactMatch.answer_pattern is '\[a'"):
        ExactMatch(answer_pattern="[a")
    with pytest.raises(ConfigError, match="no capture group"):
        ExactMatch(answer_pattern="a")


def test_rewards_take_weight_and_name():
    reward = ExactMatch(weight=0.5, name="correct")
    assert (reward.weight, reward.name) == (0.5, "correct")
    assert RegexFormat("a", weight=2.0).name == "regexformat"


def by_sample(s):
    return len(s.completion)


def by_keywords(completion, answer, *, metadata, tolerance=0.5):
    return float(completion == answer) + metadata["bonus"] + tolerance


def by_everything(**fields):
    return float(sorted(fields) == ["answer", "completion", "metadata", "prompt", "sample"])


def by_known_name(completion):
    return float(completion.startswith("f"))


def by_optional_answer(completion: str, answer: str | None) -> float:
    return float(completion == answer)


def by_prompt(prompt, sample):
    return float(prompt == sample.prompt.text)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (by_sample, 4),
        (by_keywords, 11.5),
        (by_everything, 1.0),
        (by_known_name, 1.0),
        (by_prompt, 1.0),
        (lambda completion: 7.0, 7.0),
        (functools.partial(by_keywords, tolerance=0.25), 11.25),
    ],
)
def test_function_gets_what_its_parameters_name(make_sample, function, expected):
    assert FunctionReward(function).score([make_sample("four", "four", bonus=10)]) == [expected]


@pytest.mark.parametrize(
    ("function", "needs_answer"),
    [
        (lambda completion, answer: 0.0, True),
        (functools.partial(by_keywords, tolerance=0.25), True),
        (lambda completion, answer=None: 0.0, False),
        (by_known_name, False),
        (by_everything, False),
        (by_sample, False),
        (by_optional_answer, False),
    ],
)
def test_a_function_that_takes_an_answer_needs_it_unless_it_says_otherwise(function, needs_answer):
    """Catches a run that is refused, or is not, against what the function's parameters say."""
    assert FunctionReward(function).needs_answer is needs_answer


def test_async_function(make_sample):
    async def score(completion):
        await asyncio.sleep(0)
        return float(len(completion))

    awaitable = FunctionReward(score).score([make_sample("four"), make_sample("by")])
    assert inspect.isawaitable(awaitable)
    assert asyncio.run(awaitable) == [4.0, 2.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completion, truth: 0.0, "'truth' is not a field of a sample.*prompt, completion, answer, metadata"),
        (lambda completions, **kwargs: 0.0, "'completions' is not a field of a sample. Did you mean 'completion'"),
        (lambda completion, anwser=None: 0.0, "'anwser' is not a field of a sample. Did you mean 'answer'"),
        (lambda first, second: 0.0, "'first' is not a field of a sample"),
        (lambda tolerance=0.1: 0.0, "takes no field of the sample"),
        (3, "parameters cannot be read"),
    ],
)
def test_function_with_a_parameter_that_nothing_fills(function, message):
    with pytest.raises(ConfigError, match=message):
        FunctionReward(function)


def test_function_names():
    assert FunctionReward(by_sample).name == "by_sample"
    assert FunctionReward(functools.partial(by_keywords, tolerance=1)).name == "by_keywords"
    assert FunctionReward(lambda completion: 0.0).name == "lambda"
    assert FunctionReward(by_sample, name="length").name == "length"


def test_function_is_an_import_path_in_yaml(tmp_path, monkeypatch, make_sample):
    (tmp_path / "my_rewards.py").write_text("async def score(completion):\n    return len(completion)\n")
    monkeypatch.syspath_prepend(tmp_path)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=list[Reward])
    spec = {"class_path": "rlplug.rewards.FunctionReward", "init_args": {"function": "my_rewards.score", "weight": 2}}
    dumped = parser.dump(parser.parse_args([f"--rewards={json.dumps([spec])}"]))
    assert "function: my_rewards.score" in dumped
    (reward,) = parser.instantiate(parser.parse_string(dumped)).rewards
    assert (reward.name, reward.weight) == ("score", 2.0)
    assert asyncio.run(reward.score([make_sample("four")])) == [4]


def test_import_is_cheap():
    code = "import sys, rlplug.rewards; print([m for m in ('math_verify', 'reasoning_gym') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
