"""Whatever a reward returns, raises or changes costs its own samples, and nothing else."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hostile import HugeText, Leaving, RaisingRepr, Slow, Unprintable, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlplug.errors import ConfigError
from rlplug.interfaces.reward import Reward
from rlplug.rewards import FunctionReward, RewardRunner
from rlplug.types import RewardError, Sample

LARGEST = 1e15


class Answering(Reward):
    """Returns what it is told to."""

    batch_size = 2

    def __init__(self, answer, weight=1.0):
        super().__init__(weight)
        self.answer = answer

    def score(self, samples):
        return self.answer()


def check(sample: Sample) -> None:
    for value in sample.rewards.values():
        if isinstance(value, RewardError):
            assert 0 < len(value.message.encode()) < 10_000
        else:
            assert type(value) is float
            assert abs(value) <= LARGEST
    assert math.isnan(sample.reward) if sample.errors else abs(sample.reward) <= LARGEST


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    first=values, second=values, whole=values, shape=st.integers(0, 3), weight=st.sampled_from([1.0, -2.0, 1e15, 0.0])
)
def test_every_score_is_a_number_that_trains_or_an_error(make_sample, first, second, whole, shape, weight):
    """Generates results: one that gets through unchecked would end the run, or train on infinity."""
    answers = [lambda: [first, second], lambda: iter((first, second)), lambda: whole, lambda: [RewardError(first), 1.0]]
    for sample in RewardRunner([Answering(answers[shape], weight)]).score([make_sample()] * 2):
        check(sample)


def test_an_error_without_a_message_says_so(make_sample):
    (sample,) = RewardRunner([FunctionReward(lambda completion: RewardError(""), name="f")]).score([make_sample()])
    assert "without a message" in sample.errors["f"].message


def do_raise(error):
    raise error


def endless():
    while True:
        time.sleep(0.01)
        yield from ()


@pytest.mark.parametrize(
    "answer",
    [
        lambda: do_raise(Unprintable()),
        lambda: do_raise(HugeText()),
        lambda: do_raise(SystemExit(0)),
        lambda: do_raise(ValueError(Leaving())),
        lambda: [Leaving(), RaisingRepr()],
        lambda: [Slow(), 1.0],
        lambda: endless(),
        lambda: itertools.repeat(1.0),
    ],
)
def test_every_failure_is_an_error_within_the_deadline(make_sample, answer):
    """A generator was consumed, and a number converted, in the main thread: past the deadline, or ending the run."""
    began = time.perf_counter()
    for sample in RewardRunner([Answering(answer)], deadline_s=0.5).score([make_sample()] * 2):
        assert sample.errors
        check(sample)
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize(("value", "weight"), [(1e15, 10.0), (-1e14, 100.0), (1e15, 1e15)])
def test_a_weighted_sum_that_float32_cannot_train_names_the_reward(make_sample, value, weight):
    runner = RewardRunner([FunctionReward(lambda completion: value, weight, "big"), FunctionReward(lambda sample: 1.0)])
    (sample,) = runner.score([make_sample()])
    assert list(sample.errors) == ["big"]
    assert "its weight" in sample.errors["big"].message


@pytest.mark.parametrize("weight", [math.nan, math.inf, "1", None])
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(ConfigError, match="weight of reward 'f'"):
        RewardRunner([FunctionReward(lambda completion: 1.0, weight, "f")])


def test_what_a_reward_changes_reaches_no_other_sample(make_sample):
    """The samples of a group share their prompt: a reward that pops an entry of metadata took it from the others."""
    seen = []

    def pop(metadata, answer):
        seen.append((len(metadata["tests"]), len(answer)))
        metadata["tests"].pop()
        answer.append(1)
        return 1.0

    sample = make_sample(answer=[])
    sample.prompt.metadata["tests"] = [1]
    scored = RewardRunner([FunctionReward(pop), FunctionReward(pop, name="again")]).score([sample] * 4)
    assert seen == [(1, 0)] * 8
    assert all(each.reward == 2.0 and each.prompt is sample.prompt for each in scored)
