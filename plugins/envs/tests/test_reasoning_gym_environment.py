from __future__ import annotations

import pytest
import reasoning_gym
from rlplug_envs.reasoning_gym import ReasoningGymEnvironment
from rlplug_rewards.reasoning_gym import ReasoningGymSource

from rlplug.errors import ConfigError
from rlplug.types import Prompt

TASK = "chain_sum"


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return prompt_of(TASK)


def prompt_of(task: str) -> Prompt:
    [row] = ReasoningGymSource(task, size=1).rows()
    return Prompt(row.uid, (), "", row.answer, row.metadata)


def begun(prompt: Prompt, **options: object) -> ReasoningGymEnvironment:
    environment = ReasoningGymEnvironment(**{"num_processes": 1, **options})  # type: ignore[arg-type]
    environment.reset(prompt, seed=0)
    return environment


def test_a_right_answer_ends_the_trajectory_at_once(prompt):
    result = begun(prompt).step(f"I think <answer>{prompt.answer}</answer>")
    assert (result.done, result.reward) == (True, 1.0)
    assert result.metrics == {"attempts": 1.0, "solved": 1.0}


def test_a_wrong_answer_gets_feedback_until_the_attempts_are_used_up(prompt):
    environment = begun(prompt, max_attempts=3, feedback="No. {attempts_left} left.")
    first, second, third = (environment.step(f"<answer>{guess}</answer>") for guess in ("x1", "x2", "x3"))
    assert [(step.done, step.observation) for step in (first, second)] == [
        (False, "No. 2 left."),
        (False, "No. 1 left."),
    ]
    assert third.done
    assert third.metrics == {"attempts": 3.0, "solved": 0.0}


def test_wrong_attempts_are_charged_when_another_follows(prompt):
    environment = begun(prompt, attempt_penalty=0.25)
    steps = [environment.step(text) for text in ("wrong", "wrong again", str(prompt.answer))]
    assert sum(step.reward for step in steps) == 1.0 - 2 * 0.25
    assert [step.done for step in steps] == [False, False, True]


@pytest.mark.parametrize("task", ["chain_sum", "letter_jumble", "countdown", "spell_backward"])
def test_scores_are_those_of_reasoning_gym(task):
    prompt = prompt_of(task)
    entry = prompt.metadata["entry"]
    score = reasoning_gym.get_score_answer_fn(task)
    for answer in (entry["answer"], f"{entry['answer']} or so", "42", ""):
        result = begun(prompt, max_attempts=1).step(f"<answer>{answer}</answer>")
        assert result.done
        assert result.reward == score(answer, entry)


def test_a_partial_score_can_be_right_enough():
    prompt = prompt_of("spell_backward")
    nearly = prompt.metadata["entry"]["answer"][:-1] + "?"
    partial = reasoning_gym.get_score_answer_fn("spell_backward")(nearly, prompt.metadata["entry"])
    assert 0 < partial < 1
    assert not begun(prompt).step(nearly).done
    assert begun(prompt, solved_at=partial).step(nearly).done


def test_trajectories_do_not_share_their_attempts(prompt):
    one, other = begun(prompt, max_attempts=2), begun(prompt, max_attempts=2)
    assert not one.step("wrong").done
    assert not other.step("wrong").done
    assert one.step("wrong").done


def test_other_prompts_are_refused():
    with pytest.raises(ConfigError, match=r"'train:1' is not a reasoning-gym puzzle.*ReasoningGymSource"):
        ReasoningGymEnvironment().reset(Prompt("train:1", (), "", "4", {}), seed=0)


def test_an_entry_that_cannot_be_scored_is_an_error_and_no_zero(prompt):
    broken = Prompt(prompt.uid, (), "", None, {"task": "no_such_task", "entry": {}})
    with pytest.raises(RuntimeError, match="could not score"):
        begun(broken).step("4")


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_attempts", 0), ("attempt_penalty", -1.0), ("solved_at", 0.0), ("timeout_s", 0.0), ("answer_pattern", "(")],
)
def test_an_option_that_cannot_be_is_named(option, value):
    with pytest.raises(ConfigError, match=rf"ReasoningGymEnvironment\.{option} is"):
        ReasoningGymEnvironment(**{option: value})
