"""MathVerify and ReasoningGymReward with the real libraries, in the sandbox."""

from __future__ import annotations

import copy
import dataclasses
import re
import subprocess
import sys
import time

import pytest
import reasoning_gym
from rlplug_rewards.isolation import ScorerPool
from rlplug_rewards.verifiers import MathVerify, ReasoningGymReward

from rlplug.errors import ConfigError
from rlplug.rewards import RewardRunner
from rlplug.types import RewardError

pytestmark = pytest.mark.kit


@pytest.fixture(scope="module")
def math_verify():
    return MathVerify(num_processes=1)


@pytest.fixture(scope="module")
def gym():
    return ReasoningGymReward(num_processes=1)


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("4", r"2 + 2 is \boxed{4}", 1.0),
        ("4", "The final answer is $4$. I hope it is correct.", 1.0),
        ("4", r"\boxed{5}", 0.0),
        (r"\frac{1}{2}", "The answer is 0.5", 1.0),
        (0.5, r"$\frac{1}{2}$", 1.0),
        (1e-05, r"$10^{-5}$", 1.0),
        ("x^2+1", "$1 + x^2$", 1.0),
        ("x^2+1", "$x^2 - 1$", 0.0),
        ("$(1,2)$", r"\boxed{(1,2)}", 1.0),
        ("1,234", "The answer is 1234", 1.0),
        ("4", "I do not know", 0.0),
        ("4", "1" * 10_000, 0.0),
    ],
)
def test_math_verify(make_sample, math_verify, answer, completion, expected):
    assert math_verify.score([make_sample(completion, answer)]) == [expected]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "no answer to compare with"),
        (r"\frac{1}{", "cannot be used.* is no answer that can be read"),
        ("", "cannot be used.* empty"),
        (float("nan"), "stands for one that is missing"),
        ({"value": 4}, "is an object"),
    ],
)
def test_math_verify_without_a_readable_answer_is_an_error(make_sample, math_verify, answer, message):
    (value,) = math_verify.score([make_sample(r"\boxed{4}", answer)])
    assert isinstance(value, RewardError)
    assert re.search(message, value.message)


@pytest.mark.parametrize(
    "answer", [r"\frac{1}{", float("nan"), [], r"\int_0^1 \frac", "we add them all and then divide by four"]
)
def test_a_run_does_not_start_with_an_answer_that_cannot_be_read(make_sample, math_verify, answer):
    prompts = [make_sample(answer=good).prompt for good in ("4", r"\sqrt{2}", ["3", "4"], 12.0, r"\int_0^1 x \, dx")]
    math_verify.check_prompts(prompts)
    with pytest.raises(ConfigError, match=r"reward 'mathverify' cannot use the answer of prompt 'train.jsonl:17'"):
        math_verify.check_prompts([*prompts, make_sample(answer=answer, uid="train.jsonl:17").prompt])


def test_a_list_has_the_answers_that_are_accepted(make_sample, math_verify):
    completions = [r"\boxed{3}", r"\boxed{4}", r"\boxed{3, 4}"]
    assert math_verify.score([make_sample(each, ["3", "4"]) for each in completions]) == [1.0, 1.0, 0.0]


def test_notation_is_compared_by_the_library(make_sample, math_verify):
    integral = r"\int_0^1 x^2 \, dx"
    completions = [rf"\boxed{{{integral}}}", r"\boxed{\int_0^1 x \cdot x \, dx}", r"\boxed{\int_0^1 x^3 \, dx}"]
    assert math_verify.score([make_sample(each, integral) for each in completions]) == [1.0, 1.0, 0.0]


def test_only_what_is_marked_counts_in_a_completion_that_was_cut_off(make_sample, math_verify):
    texts = [r"\boxed{4} and", "<answer>4</answer>", "The answer is 4", "<think>\\boxed{4}", r"\boxed{4"]
    cut_off = [dataclasses.replace(make_sample(text), finish_reason="length") for text in texts]
    assert math_verify.score(cut_off) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert MathVerify(finished_only=True, num_processes=1).score(cut_off[:1]) == [0.0]


def test_prose_is_counted_and_can_be_refused(make_sample):
    """A run whose policy marks nothing would not be told that its answers were read from prose."""
    samples = [make_sample(text) for text in (r"\boxed{4}", "The answer is 4.", "<think>4")]
    counted = MathVerify(num_processes=1)
    assert counted.score(samples) == [1.0, 1.0, 0.0]
    assert counted.pop_counts() == {"marked": 1, "in_prose": 1, "missing": 1}
    assert MathVerify(marked_only=True, num_processes=1).score(samples) == [1.0, 0.0, 0.0]


def test_a_thought_that_the_prompt_began_is_no_answer(make_sample, math_verify):
    sample = make_sample(r"\boxed{4}")
    begun = dataclasses.replace(sample, prompt=dataclasses.replace(sample.prompt, text="2 + 2?<think>\n"))
    ended = dataclasses.replace(begun, completion=r"Is it 5?</think>\boxed{4}")
    assert math_verify.score([sample, begun, ended]) == [1.0, 0.0, 1.0]


def test_an_answer_pattern_finds_the_answer(make_sample):
    reward = MathVerify(answer_pattern=r"RESULT=(\S+)", num_processes=1)
    assert reward.score([make_sample(text) for text in ("RESULT=3, RESULT=4.0", r"\boxed{4}")]) == [1.0, 0.0]


HANGS = r"\sum_{k=1}^{9^{9^{9}}} k^{9^{9}}"


def test_a_number_beyond_all_memory_is_an_error_and_stops_no_other_sample(make_sample):
    # sympy computes 9**(9**9) in one C call, under the interpreter's lock: in a thread, no deadline could fire
    hangs = make_sample(rf"\boxed{{{HANGS}}}", r"\int_0^n k\,dk")
    start = time.perf_counter()
    first, *others = RewardRunner([MathVerify(timeout_s=1.0, num_processes=2)]).score(
        [hangs, *[make_sample(r"\boxed{4}")] * 8]
    )
    assert first.errors["mathverify"].message == "took longer than 1 s (timeout_s)"
    assert [sample.reward for sample in others] == [1.0] * 8
    assert time.perf_counter() - start < 15


def test_a_child_that_ended_is_replaced(make_sample):
    reward = MathVerify(timeout_s=1.0, num_processes=1)
    hangs = make_sample(rf"\boxed{{{HANGS}}}", r"\int_0^n k\,dk")
    first, second, third = reward.score([make_sample(r"\boxed{4}"), hangs, make_sample(r"\boxed{4}")])
    assert (first, third) == (1.0, 1.0)
    assert isinstance(second, RewardError)


def test_a_copy_scores_too(make_sample, math_verify):
    assert copy.deepcopy(math_verify).score([make_sample(r"\boxed{4}")]) == [1.0]


@pytest.mark.nightly
def test_children_end_with_the_process():
    code = (
        "import subprocess, threading, time\n"
        "from rlplug_rewards.isolation import ScorerPool\n"
        "pool = ScorerPool('math_verify', 2, 1.0)\n"
        "print(pool.score(['4'], '4', True), flush=True)\n"
        f"hangs = ([r'\\int_0^n k\\,dk'], r'{HANGS}', True)\n"
        "threading.Thread(target=pool.score, args=hangs, daemon=True).start()\n"
        "time.sleep(0.5)\n"
        "print(*[child.pid for child in pool._pool._workers])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stderr == ""
    score, *pids = result.stdout.split()
    assert float(score) == 1.0
    deadline = time.monotonic() + 10
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if _is_running(pid)]


def _is_running(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "knights_knaves"])
def test_reasoning_gym_gives_full_score_to_its_own_answer(make_sample, gym, task):
    entry = reasoning_gym.create_dataset(task, size=1, seed=0)[0]
    samples = [
        make_sample(f"<answer>no</answer> rather <answer>\n{entry['answer']}</answer>", task=task, entry=entry),
        make_sample(f" {entry['answer']}\n", task=task, entry=entry),
    ]
    assert gym.score(samples) == [1.0, 1.0]


def test_reasoning_gym_gives_what_the_library_gives(make_sample, gym):
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]
    answer = f"It is {entry['answer']}, I think"
    expected = reasoning_gym.get_score_answer_fn("chain_sum")(answer, entry)
    assert 0 < expected < 1
    assert gym.score([make_sample(f"<answer>{answer}</answer>", task="chain_sum", entry=entry)]) == [expected]


def test_reasoning_gym_with_an_answer_pattern_wants_a_match(make_sample):
    reward = ReasoningGymReward(answer_pattern=r"#### (.*)", num_processes=1)
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]
    samples = [make_sample(text + entry["answer"], task="chain_sum", entry=entry) for text in ("#### ", "")]
    assert reward.score(samples) == [1.0, 0.0]


def test_reasoning_gym_prompts_must_name_a_task(make_sample, gym):
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]
    values = gym.score([make_sample(), make_sample(task="chain_summ", entry=entry)])
    assert all(isinstance(value, RewardError) for value in values)
    assert "lacks 'task'" in values[0].message
    assert "'chain_summ' not registered" in values[1].message


def test_code_in_an_answer_cannot_end_the_trainer(make_sample, gym):
    # this task's scorer calls eval on what the model wrote
    entry = reasoning_gym.create_dataset("binary_matrix", size=1, seed=0)[0]
    completion = "__import__('os')._exit(3)"
    (value,) = gym.score([make_sample(completion, task="binary_matrix", entry=entry)])
    assert isinstance(value, RewardError)
    assert "with code 3" in value.message


@pytest.mark.parametrize(("reward", "package"), [(MathVerify, "math_verify"), (ReasoningGymReward, "reasoning_gym")])
def test_a_missing_extra_is_named_at_construction(monkeypatch, reward, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}: pip install 'rlplug-rewards\[reasoning\]'"):
        reward()


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"MathVerify.timeout_s is 0"):
        MathVerify(timeout_s=0)
    with pytest.raises(ConfigError, match=r"ReasoningGymReward.num_processes is 0"):
        ReasoningGymReward(num_processes=0)


def test_a_scorer_that_cannot_start_is_an_error():
    value = ScorerPool("no_such_scorer", 1, 1.0).score("4", "4")
    assert isinstance(value, RewardError)
    assert "no_such_scorer cannot be called" in value.message
