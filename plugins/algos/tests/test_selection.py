"""Which samples DAPO and PF-PPO train on: cases by hand."""

from __future__ import annotations

import dataclasses

import pytest
from algorithm_cases import CASES
from rlplug_algos.dapo import DAPO
from rlplug_algos.pf_ppo import PFPPO

from rlplug.types import Prompt, RewardError, Sample

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
    samples[1] = dataclasses.replace(samples[1], token_ids=(1, *[2] * 10), response_mask=(False, *[True] * 10))
    assert list(DAPO(overlong_buffer=2).select(samples)) == []


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
    samples = [group(0.1, 0.9, FAILED, 0.5, -1.0, number=number) for number in range(60)]
    kept = [chosen(PFPPO(keep="best_random"), group) for group in samples]
    assert {tuple(pair) for pair in kept} == {(0, 1), (1, 3), (1, 4)}
    # every rank draws the same, each step something else
    assert [chosen(PFPPO(keep="best_random"), group) for group in samples] == kept
    later = [group(0.1, 0.9, FAILED, 0.5, -1.0, number=number, version=4) for number in range(60)]
    assert [chosen(PFPPO(keep="best_random"), group) for group in later] != kept


def test_pf_ppo_with_one_valid_sample_has_no_other_one():
    assert chosen(PFPPO(keep="best_random"), group(FAILED, 0.5)) == [1]
    assert chosen(PFPPO(keep="best_random"), group(FAILED)) == []
