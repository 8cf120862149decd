"""Rewards that are clipped and scaled: against NumPy, over ranks, after a resume, and with failed samples."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy
import pytest
from rlplug_algos.dapo import DAPO
from rlplug_rewards.judges.judge import JudgeBase
from rlplug_rewards.scaling import EnvironmentReward, RunningSpread, ScaledReward, group_scaled
from rlplug_rewards.text import ExactMatch

from rlplug.errors import ConfigError
from rlplug.interfaces.checks.reward_problems import check_group_rewards
from rlplug.rewards import FunctionReward, RewardRunner
from rlplug.types import RewardError, StepBatch


def number(completion):
    return RewardError("no number") if completion == "failed" else float(completion)


def length(completion):
    return len(completion)


def alone(array):
    return array


def scaled(weight=1.0, **options):
    return ScaledReward(FunctionReward(number), weight=weight, **options)


def samples_of(make_sample, *groups):
    return [
        dataclasses.replace(make_sample(str(value)), group=index)
        for index, values in enumerate(groups)
        for value in values
    ]


def trained(runner, samples, gather=alone):
    """What trains, NaN for a sample that does not."""
    found = runner.scale(runner.score(samples), gather)
    return [math.nan if sample.errors else sample.trained_reward for sample in found]


def test_bounds_come_first_and_the_weight_last(make_sample):
    """The logged value stays what the reward returned."""
    runner = RewardRunner([scaled(2.0, clip=(-1, 3)), FunctionReward(length)])
    found = runner.scale(runner.score(samples_of(make_sample, [-7, 2, 99])), alone)
    assert [sample.trained_reward for sample in found] == [2 * -1 + 2, 2 * 2 + 1, 2 * 3 + 2]
    assert [sample.rewards["number"] for sample in found] == [-7, 2, 99]
    assert [sample.reward for sample in found] == [2 * -7 + 2, 2 * 2 + 1, 2 * 99 + 2]
    assert StepBatch.from_samples(found).rewards.tolist() == [0.0, 5.0, 8.0]
    assert trained(RewardRunner([scaled(clip=(None, 3))]), samples_of(make_sample, [-7, 99])) == [-7, 3]


def test_groups_are_normalised_each_by_itself(make_sample):
    """A group of equal values and one of a single sample have nothing to compare, whatever round-off says."""
    values = [[1.0, 2.0, 6.0], [0.1 + 0.2, 0.3, 0.3], [5.0], [1000, 3000]]
    found = trained(RewardRunner([scaled(0.5, scale="group")]), samples_of(make_sample, *values))
    normal = (numpy.array(values[0]) - 3) / numpy.std(values[0], ddof=1)
    assert found == pytest.approx([*0.5 * normal, 0, 0, 0, 0, -0.5 / math.sqrt(2), 0.5 / math.sqrt(2)])


def test_a_group_is_scaled_alike_in_any_unit():
    values, groups = numpy.array([0.0, 1.0, 1.0, 0.2, 0.9]), numpy.array([3, 3, 3, 7, 7])
    assert group_scaled(1e6 * values + 1e9, groups) == pytest.approx(group_scaled(values, groups), rel=1e-5)
    assert group_scaled(1e-9 * values, groups) == pytest.approx(group_scaled(values, groups))


def test_running_divides_by_the_deviation_of_all_samples_so_far(make_sample):
    rounds = [[[2.0, 2.0]], [[1.0, 4.0], [-3.0, 0.5]], [[10.0, 20.0]]]
    runner, seen = RewardRunner([scaled(scale="running")]), []
    for groups in rounds:
        seen += [value for values in groups for value in values]
        std = numpy.std(seen, ddof=1) or 1.0  # equal so far: as they are
        expected = [value / std for values in groups for value in values]
        assert trained(runner, samples_of(make_sample, *groups)) == pytest.approx(expected)
    assert trained(runner, []) == []
    assert RunningSpread(count=1).divisor == 1.0


def test_failed_samples_stay_errors_and_count_in_nothing(make_sample):
    """Of a sample that another reward failed on, too: it does not train."""

    def picky(completion):
        return RewardError("no") if completion == "50" else 0.0

    for kind in ("group", "running"):
        runner = RewardRunner([scaled(scale=kind), FunctionReward(picky)])
        whole = trained(runner, samples_of(make_sample, [1, "failed", 2, 50, 4]))
        state = runner.state_dict()
        kept = RewardRunner([scaled(scale=kind), FunctionReward(picky)])
        assert [value for value in whole if value == value] == trained(kept, samples_of(make_sample, [1, 2, 4]))
        assert [value != value for value in whole] == [False, True, False, True, False]
        assert state == kept.state_dict()


def of_environment(make_sample, *groups):
    """Samples that come with an environment's reward, or its error."""
    found = samples_of(make_sample, *groups)
    return [dataclasses.replace(each, rewards={"environment": number(each.completion)}) for each in found]


def test_the_reward_of_an_environment_is_scaled_like_any_other(make_sample):
    """It counts once; what is logged stays the environment's, and so does its error."""
    whole = ScaledReward(EnvironmentReward(), clip=(0, 10), scale="running", weight=0.5)
    runner = RewardRunner([whole, FunctionReward(length)], has_environment=True)
    assert runner.names == ["environment", "length"]
    found = runner.scale(runner.score(of_environment(make_sample, [4, 20, "failed"])), alone)
    std = numpy.std([4, 10], ddof=1)
    assert [each.trained_reward for each in found[:2]] == pytest.approx([0.5 * 4 / std + 1, 0.5 * 10 / std + 2])
    assert found[2].errors == {"environment": RewardError("no number")}
    assert [each.reward for each in found[:2]] == [0.5 * 4 + 1, 0.5 * 20 + 2]
    assert found[0].rewards["environment"] == 4

    resumed = RewardRunner(
        [ScaledReward(EnvironmentReward(), clip=(0, 10), scale="running", weight=0.5)], 30, 64, 1, True
    )
    resumed.load_state_dict(runner.state_dict())
    later = of_environment(make_sample, [7, 1])
    rest = RewardRunner([whole], has_environment=True)
    assert trained(resumed, later) == trained(rest, later)


def test_the_reward_of_an_environment_gets_a_weight_and_no_other_name(make_sample):
    weighted = RewardRunner([EnvironmentReward(weight=3)], has_environment=True)
    assert trained(weighted, of_environment(make_sample, [4, 5])) == [12, 15]
    for rewards, has_environment in (
        ([EnvironmentReward()], False),
        ([FunctionReward(number, name="environment")], True),
    ):
        with pytest.raises(ConfigError, match="environment"):
            RewardRunner(rewards, has_environment=has_environment)
    with pytest.raises(ConfigError, match=r"ScaledReward\.name is 'other'"):
        ScaledReward(EnvironmentReward(), clip=(0, 1), name="other")


def test_ranks_scale_as_one_does(make_sample):
    """To the last bit: sums of each rank's own samples, or in another order, would round otherwise."""
    draw = numpy.random.default_rng(5)
    samples = samples_of(make_sample, *(draw.normal(3, 10.0 ** draw.integers(-3, 4), 4).tolist() for _ in range(7)))
    parts = [[each for each in samples if each.group % 2 == rank] for rank in (1, 0)]
    one, *ranks = (RewardRunner([scaled(scale="running")]) for _ in range(3))
    for _ in range(2):
        whole = trained(one, samples)
        told: list[numpy.ndarray] = []
        for part in parts:
            trained(RewardRunner([scaled(scale="running")]), part, functools.partial(tell, told))
        everyone = numpy.concatenate(told)
        found = [trained(rank, part, lambda _, e=everyone: e) for rank, part in zip(ranks, parts, strict=True)]
        assert found[1] + found[0] == [
            value for rank in (0, 1) for each, value in zip(samples, whole, strict=True) if each.group % 2 == rank
        ]
    assert ranks[0].state_dict() == ranks[1].state_dict() == one.state_dict()


def tell(told, array):
    told.append(array.copy())
    return array


def test_a_resumed_run_scales_as_it_would_have(make_sample):
    rounds = [samples_of(make_sample, [0.1 * step, 3 / (step + 1)], [step**2]) for step in range(6)]
    undisturbed, resumed = RewardRunner([scaled(scale="running")]), RewardRunner([scaled(scale="running")])
    for samples in rounds[:3]:
        trained(undisturbed, samples)
    resumed.load_state_dict(undisturbed.state_dict())
    for samples in rounds[3:]:
        assert trained(resumed, samples) == trained(undisturbed, samples)
    resumed.load_state_dict({})  # of a run without this reward
    assert resumed.state_dict() == RewardRunner([scaled(scale="running")]).state_dict()


def test_dynamic_sampling_judges_what_trains(make_sample):
    """Clipped to one value, a group teaches nothing, and DAPO must draw another in its place."""
    runner = RewardRunner([scaled(clip=(0, 1))])
    group = runner.scale(runner.score(samples_of(make_sample, [1, 7])), alone)
    assert DAPO().select(group) == ()
    assert len(DAPO().select(runner.score(samples_of(make_sample, [1, 7])))) == 2


def test_all_else_is_the_reward_s_own(make_sample):
    """Also for a class of a stranger, which knows neither key."""

    class Stranger(JudgeBase):
        def __init__(self):
            self.weight, self.name, self.deadline_s = 1.0, "stranger", 7.0

        batch_size, needs_answer = 3, True

        def notes(self):
            return ["asked"]

        def pop_counts(self):
            return {"requests": 2.0}

        def score(self, samples):
            return [float(len(samples))] * len(samples)

    reward = ScaledReward(Stranger(), scale="running", weight=0.5)
    assert (reward.name, reward.batch_size, reward.needs_answer, reward.deadline_s) == ("stranger", 3, True, 7.0)
    runner = RewardRunner([reward])
    assert [sample.rewards["stranger"] for sample in runner.score([make_sample("a")] * 4)] == [3, 3, 3, 1]
    assert (reward.notes(), runner.pop_own_counts()) == (["asked"], {"stranger/requests": 2.0})
    with pytest.raises(ConfigError, match="no answer"):
        ScaledReward(ExactMatch(), scale="group").check_prompts([make_sample("a", answer=None).prompt])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": (1, 1)}, r"ScaledReward\.clip is \[1, 1\]: give a lowest value below the highest"),
        ({"clip": (2.0, -2.0)}, r"clip is \[2\.0, -2\.0\]"),
        ({"clip": (None, None)}, "bounds nothing"),
        ({"clip": (0.0, math.nan)}, "give the lowest and the highest"),
        ({"clip": (0.0,)}, "give the lowest and the highest"),
        ({"scale": "std"}, "scale is 'std': give none, group or running"),
        ({}, "neither clip nor scale"),
        ({"scale": "group", "reward": FunctionReward(number, weight=0.5)}, "weight 0.5, which would not count"),
        ({"scale": "group", "reward": scaled(scale="running")}, "scales by itself"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        ScaledReward(**{"reward": FunctionReward(number), **options})


def test_groups_of_one_are_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"'number' compares .* model\.batch\.group_size is 1"):
        check_group_rewards([scaled(scale="group")], 1, None)
    check_group_rewards([scaled(scale="running")], 1, None)
    check_group_rewards([scaled(scale="group")], 2, 1)  # a validation scales nothing
