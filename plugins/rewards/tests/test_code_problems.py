"""Problems of the kinds of MBPP, HumanEval and contests: their references score 1, and their wrong twins 0."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from isolated_code import code_reward

from rlplug.rewards import RewardRunner

PROBLEMS = [
    json.loads(line)
    for line in Path(__file__).with_name("code_problems.jsonl").read_text(encoding="utf-8").splitlines()
]
OFTEN = {
    "sum of common divisors",
    "Counter",
    "sort in place",
    "vector",
    "endless generator",
    "raises its own",
    "main guard",
    "async callback",
    "async program",
}


def scores(make_sample: Any, problems: list[dict[str, Any]], which: str) -> dict[str, Any]:
    """Return the reward of a solution of each problem, by the problem's name."""
    reward = code_reward(all_or_nothing=True, test_s=100.0, timeout_s=300.0, num_processes=2)
    samples = []
    for problem in problems:
        row = {key: value for key, value in problem.items() if key not in ("name", "reference", "wrong")}
        made = make_sample(f"```python\n{problem[which].rstrip()}\n```", **row)
        samples.append(dataclasses.replace(made, last_turn=made.completion))
    found = RewardRunner([reward], deadline_s=3000).score(samples)
    return {problem["name"]: sample.rewards["codereward"] for problem, sample in zip(problems, found, strict=True)}


def check(make_sample: Any, problems: list[dict[str, Any]]) -> None:
    right, wrong = (scores(make_sample, problems, which) for which in ("reference", "wrong"))
    assert {name: value for name, value in right.items() if value != 1.0} == {}
    assert {name: value for name, value in wrong.items() if value != 0.0} == {}


def test_a_sample_of_problems(make_sample):
    problems = [problem for problem in PROBLEMS if problem["name"] in OFTEN]
    assert len(problems) == len(OFTEN)
    check(make_sample, problems)


@pytest.mark.nightly
def test_all_problems(make_sample):
    assert len(PROBLEMS) >= 100
    check(make_sample, PROBLEMS)
