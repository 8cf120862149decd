"""Which samples DAPO and PF-PPO train on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from algorithm_cases import CASES, advantages_of
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import RUN
from rlplug_algos.dapo import DAPO
from rlplug_algos.pf_ppo import PFPPO
from rlplug_devkit.padded_rows import PaddedRows

from rlplug.types import Prompt, RewardError, Sample, StepBatch

FAILED = None


def group(*rewards, version=3, number=7):
    """Samples of one prompt; ``FAILED`` stands for a reward that could not be computed."""
    return [
        Sample(
            prompt=Prompt(uid="0", token_ids=(1,), text=""),
            group=number,
            token_ids=(1, 2 + index),
            response_mask=(False, True),
            rollout_logprobs=(0.0, -0.5),
            completion=str(index),
            finish_reason="stop",
            policy_version=version,
            rewards={"r": RewardError("no")} if reward is FAILED else {"r": reward},
            # what a failed sample says here is meaningless
            reward=100.0 if reward is FAILED else reward,
        )
        for index, reward in enumerate(rewards)
    ]


def long(sample, length):
    """The sample with a response of ``length`` tokens."""
    return dataclasses.replace(
        sample,
        token_ids=(1, *[2] * length),
        response_mask=(False, *[True] * length),
        rollout_logprobs=(0.0,) * (length + 1),
    )


def made(algorithm, seed=0):
    """The algorithm in a run with ``seed``."""
    algorithm.setup(dataclasses.replace(RUN, seed=seed))
    return algorithm


def chosen(algorithm, samples):
    """Positions of the samples that train."""
    return sorted(int(sample.completion) for sample in algorithm.select(samples))


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ((1.0, 0.0, 0.0), True),
        ((0.0, 0.0, 0.0), False),
        ((1.0, 1.0), False),
        ((0.5, 0.5, 0.75), True),
        ((1.0,), False),
        ((1.0, FAILED), False),
        ((1.0, FAILED, 1.0), False),
        ((1.0, FAILED, 0.0), True),
        ((FAILED, FAILED), False),
    ],
)
def test_dapo_rejects_prompts_without_a_signal(rewards, kept):
    samples = group(*rewards)
    assert list(DAPO().select(samples)) == (samples if kept else [])
    assert list(DAPO(dynamic_sampling=False).select(samples)) == samples


def test_dapo_looks_at_raw_rewards():
    """Equal rewards stay equal whatever the punishment of length does to them later."""
    samples = group(1.0, 1.0)
    samples[1] = long(samples[1], 10)
    assert list(DAPO(overlong_buffer=2).select(samples)) == []


TIES = [0.3, 0.1 + 0.2, 1.0, 1.0 + 1e-9, 1.0 - 1e-8, 0.0, -0.0, 1e-46, 1e-42, 1e30, 1.0000001e30, -2.0, 0.75, FAILED]
"""Rewards that differ as Python numbers, and in float32 or its squares some of them do not."""
OPTIONS = [{}, {"epsilon": 0.5}, {"overlong_buffer": 4}, {"overlong_buffer": 4, "overlong_penalty": 0.25}]


@settings(max_examples=400, derandomize=True)
@given(
    st.sampled_from(OPTIONS),
    st.lists(
        st.lists(st.tuples(st.sampled_from(TIES), st.integers(1, 8)), min_size=1, max_size=5), min_size=1, max_size=4
    ),
)
def test_dapo_trains_on_a_group_that_gets_an_advantage(options, drawn):
    """It is chosen by what ``advantages`` gives it in a step's batch, with and without the punishment of length."""
    groups = []
    for number, rows in enumerate(drawn):
        samples = group(*[reward for reward, _ in rows], number=number)
        lengths = [length for _, length in rows]
        groups.append([long(sample, length) for sample, length in zip(samples, lengths, strict=True)])
    batch = PaddedRows.of(StepBatch.from_samples([sample for samples in groups for sample in samples]))
    without = {name: value for name, value in options.items() if not name.startswith("overlong")}
    gets = torch.ones(batch.num_sequences, dtype=torch.bool)
    for algorithm in (made(DAPO(**without)), made(DAPO(**options))):
        advantages = advantages_of(algorithm, batch).advantages
        gets &= torch.stack([advantages[batch.group_index == index].any() for index in batch.group_index])
    for samples in groups:
        assert bool(made(DAPO(**options)).select(samples)) == bool(gets[batch.group_index == samples[0].group].any())


def test_dapo_refills():
    """verl's max_num_gen_batches is 10: the first and 9 more."""
    assert (DAPO().max_refills, DAPO().over_sampling) == (9, 1.0)
    assert (DAPO(max_refills=2, over_sampling=3.0).max_refills, DAPO(over_sampling=3.0).over_sampling) == (2, 3.0)


@pytest.mark.parametrize("case", [case for case in CASES if case.algorithm not in (DAPO, PFPPO)], ids=str)
def test_the_others_keep_every_sample(case):
    samples = group(1.0, 1.0, FAILED)
    algorithm = case.make()
    assert list(algorithm.select(samples)) == samples
    assert (algorithm.max_refills, algorithm.over_sampling) == (0, 1.0)


@pytest.mark.parametrize(
    ("rewards", "best", "best_worst"),
    [
        ((0.1, 0.9, -0.3, 0.5), [1], [1, 2]),
        ((0.1, 0.9), [1], [0, 1]),
        ((FAILED, 0.2, 0.7, FAILED, 0.3), [2], [1, 2]),
        ((0.4,), [0], [0]),
        ((FAILED, 0.4), [1], [1]),
        ((FAILED, FAILED), [], []),
    ],
)
def test_pf_ppo(rewards, best, best_worst):
    samples = group(*rewards)
    assert chosen(PFPPO(keep="best"), samples) == best
    assert chosen(PFPPO(keep="best_worst"), samples) == best_worst
    assert chosen(PFPPO(), samples) == best_worst


def test_pf_ppo_breaks_ties_by_order():
    assert chosen(PFPPO(keep="best"), group(0.0, 1.0, 1.0, 0.0)) == [1]
    assert chosen(PFPPO(keep="best_worst"), group(0.0, 1.0, 1.0, 0.0)) == [1, 3]  # of equal ones the later is worse
    assert chosen(PFPPO(keep="best_worst"), group(1.0, 1.0, 1.0)) == [0, 2]


def test_pf_ppo_keeps_the_best_and_a_random_other_one():
    """Every rank draws the same; another run, step or group something else; and a resumed run goes on as it would."""
    groups = [group(0.1, 0.9, FAILED, 0.5, -1.0, number=number) for number in range(60)]

    def step_of(algorithm):
        kept = [tuple(chosen(algorithm, samples)) for samples in groups]
        algorithm.after_step({})
        return kept

    first, same, other = (made(PFPPO(keep="best_random"), seed) for seed in (5, 5, 6))
    steps = [step_of(first) for _ in range(3)]
    assert set(steps[0]) == {(0, 1), (1, 3), (1, 4)}
    assert [step_of(same) for _ in range(2)] == steps[:2]
    resumed = made(PFPPO(keep="best_random"), 5)
    resumed.load_state_dict(same.state_dict())
    assert step_of(resumed) == steps[2]
    drawn = [*steps, step_of(other)]
    assert len({tuple(kept) for kept in drawn}) == len(drawn)


def test_pf_ppo_with_one_valid_sample_has_no_other_one():
    assert chosen(PFPPO(keep="best_random"), group(FAILED, 0.5)) == [1]
    assert chosen(PFPPO(keep="best_random"), group(FAILED)) == []
