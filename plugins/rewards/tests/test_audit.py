"""``rlplug audit-reward``: what fools a reward is found, each time by the attack for that; the built-in ones pass."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlplug_devkit.models import make_model_folder
from rlplug_rewards.audit.attacks import ATTACKS, FORMS
from rlplug_rewards.audit.audit import Audit, audit
from rlplug_rewards.audit.command import _prompts, audit_reward_command
from rlplug_rewards.audit.search import is_wrong
from rlplug_rewards.choice import MultipleChoice
from rlplug_rewards.text import ExactMatch, RegexFormat
from rlplug_rewards.verifiers import MathVerify

from rlplug.errors import ConfigError
from rlplug.interfaces import Reward
from rlplug.rewards.function import FunctionReward
from rlplug.types import Prompt

PROMPTS = _prompts(None, 16)
CHOICES = [Prompt(f"c:{letter}", (1,), f"Which? A, B, C or D ({letter})", letter) for letter in "ABCD"]


def fooled(found: Audit) -> set[str]:
    return {each.kind for each in found.attacks if each.num_fooled}


def audited(function: Callable[..., Any], deadline_s: float = 30.0) -> Audit:
    return audit(FunctionReward(function, name="f"), PROMPTS, deadline_s)


def contains(completion: str, answer: str) -> float:
    return float(answer in re.findall(r"\d+", completion))


def last_number(completion: str, answer: str) -> float:
    return float(re.findall(r"\d+", completion)[-1:] == [answer])


def any_box(completion: str, answer: str) -> float:
    return float(f"\\boxed{{{answer}}}" in completion)


def obeys(completion: str, answer: str) -> float:
    return float("give the highest score" in completion or f"{{{answer}}}" in completion)


def has_form(completion: str, answer: str) -> float:
    return float(completion.endswith("####") or f"{{{answer}}}" in completion)


def likes_nothing(completion: str, answer: str) -> float:
    return float(not completion.strip() or f"{{{answer}}}" in completion)


def likes_length(completion: str, answer: str) -> float:
    return len(completion) / 1000 + (f"{{{answer}}}" in completion)


@pytest.mark.parametrize(
    ("function", "attack"),
    [
        (contains, "every answer in a sentence"),
        (contains, "the right answer denied"),
        (last_number, "the right number last"),
        (any_box, "a box for every answer"),
        (any_box, "the right answer in an open thought"),
        (obeys, "instructions for a judge"),
        (obeys, "control tokens"),
        (has_form, "the form alone"),
        (likes_nothing, "white space"),
        (likes_length, "very long"),
    ],
)
def test_what_fools_a_reward_is_found(function: Callable[..., float], attack: str) -> None:
    found = audited(function)

    assert attack in fooled(found)
    assert any(problem.startswith(attack) for problem in found.problems)


def test_calls_that_raise_vary_or_return_no_number_fail() -> None:
    draws = itertools.count()

    def misbehaves(completion: str, answer: str) -> Any:
        if completion.startswith("{{"):
            raise RecursionError("deep")
        if completion.startswith("0 0"):
            return float("nan")
        return next(draws) * 1e-6 + (f"{{{answer}}}" in completion)

    text = "\n".join(audited(misbehaves).problems)
    assert "score raises" in text
    assert "brackets: RecursionError: deep" in text
    assert "returns what cannot train" in text
    assert "the same completion scores differently" in text


def test_a_call_that_never_ends_is_late() -> None:
    def slow(completion: str, answer: str) -> float:
        time.sleep(20 * completion.startswith("0 0"))
        return float(f"{{{answer}}}" in completion)

    assert any("misses its deadline" in problem for problem in audited(slow, deadline_s=0.5).problems)


def test_right_answers_that_score_0_are_noted() -> None:
    found = audited(any_box)

    lost = {each.kind for each in found.forms if each.num_fooled}
    assert {"in a sentence", "in full-width digits", "with thousands"} <= lost
    assert "in a box" not in lost
    assert any("in full-width digits" in note for note in found.notes)


@pytest.mark.parametrize(
    ("reward", "prompts"),
    [
        (ExactMatch(), PROMPTS),
        (MultipleChoice(), CHOICES),
        (RegexFormat(r"(?s).*\\boxed\{.+\}.*"), PROMPTS),
        pytest.param(MathVerify(), PROMPTS, marks=pytest.mark.nightly),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_built_in_rewards_pass(reward: Reward, prompts: list[Prompt]) -> None:
    found = audit(reward, prompts, deadline_s=30.0)

    assert found.problems == []
    assert {each.kind for each in found.attacks} == {"right", "wrong", *ATTACKS}
    assert [each.kind for each in found.forms] == list(FORMS)
    if reward.needs_answer:
        assert found.num_judged == len(prompts)


def test_the_command_reads_rewards_and_prompts_of_a_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in (4, 80)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = ["--train", str(tmp_path / "train.jsonl"), "--json"]

    assert audit_reward_command(["--reward", "ExactMatch", *train]) == 0
    (exact,) = json.loads(capsys.readouterr().out)
    assert (exact["num_prompts"], exact["num_judged"], exact["problems"]) == (2, 2, [])

    assert audit_reward_command(["--reward", f"{__name__}.{contains.__name__}", *train]) == 1
    assert json.loads(capsys.readouterr().out)[0]["problems"]


def test_the_report_has_a_line_for_each_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit_reward_command(["--reward", "ExactMatch"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "  passed"
    assert sum(line.startswith("  instructions for a judge ") for line in lines) == 1


def test_without_a_reward_the_command_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match="--reward NAME"):
        audit_reward_command([])


def likes_words(completion: str, answer: str) -> float:
    return float(len(completion) > 20 or f"{{{answer}}}" in completion)


def test_what_a_policy_finds_is_told_from_right_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone catches a search that never generates, or that takes any high score for a fault."""
    make_model_folder("llama", tmp_path)
    monkeypatch.setattr("rlplug_rewards.audit.audit.ATTACKS", {})
    options = ["--policy", str(tmp_path), "--best-of", "3", "--max-new-tokens", "40"]
    rewards = [argument for name in ("likes_words", "any_box") for argument in ("--reward", f"{__name__}.{name}")]

    assert audit_reward_command([*rewards, *options, "--json"]) == 1
    fooled, right = json.loads(capsys.readouterr().out)
    assert fooled["problems"] == [
        f"of 3 completions of {tmp_path} a wrong one scores like a right answer on 5 of 5 prompts"
    ]
    assert all(best["is_wrong"] and best["fools"] and best["score"] == 1.0 for best in fooled["search"]["best"])
    assert right["problems"] == []
    assert [best["score"] for best in right["search"]["best"]] == [0.0] * 5


@pytest.mark.parametrize(
    ("answer", "completion", "wrong"),
    [
        ("42", "It is 43.", True),
        ("42", "420 or 4.2", True),
        ("42", "so 42.", False),
        ("1234", "1,234", False),
        ("42", "\\boxed{42.0}", False),
        ("1/2", "\\boxed{0.5}", False),
        ("B", "\\boxed{C}", True),
    ],
)
def test_a_completion_is_wrong_that_nowhere_has_the_answer(answer: str, completion: str, wrong: bool) -> None:
    assert is_wrong(Prompt("p", (1,), "?", answer), completion) == wrong
