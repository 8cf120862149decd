"""pass@k against enumeration, and what validation reports and refuses."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from rlplug.errors import ConfigError
from rlplug.training.samples.metrics import sample_table, source_metrics
from rlplug.training.validation.config import ValidationConfig, ValidationSampling
from rlplug.training.validation.scores import pass_at_k, validation_by_source, validation_metrics
from rlplug.types import Prompt, RewardError, Rollout, Sample, SamplingParams


def sample_of(group, reward, num_tokens=1):
    failed = isinstance(reward, RewardError)
    return Sample(
        prompt=Prompt(uid=str(group), token_ids=(1,), text=""),
        group=group,
        token_ids=(1,) * (1 + num_tokens),
        response_mask=(False,) + (True,) * num_tokens,
        rollout_logprobs=(0.0,) * (1 + num_tokens),
        completion="",
        finish_reason="stop",
        policy_version=0,
        rewards={"r": reward},
        reward=9.0 if failed else reward,  # meaningless: the sum of the rewards that did not fail
    )


def metrics_of(samples, pass_threshold):
    table = sample_table(Rollout(tuple(samples)), ["r"], lambda table: table)
    return validation_metrics(table, ["r"], pass_threshold)


def enumerated_pass_at_k(passes, k):
    """Share of the k-subsets with a pass in them."""
    subsets = list(itertools.combinations(passes, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(num_samples):
    for num_passed in range(num_samples + 1):
        passes = [index < num_passed for index in range(num_samples)]
        for k in range(1, num_samples + 1):
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(enumerated_pass_at_k(passes, k), abs=1e-12)


def test_metrics():
    late = RewardError("late")
    rewards = [[1.0, 0.0, 0.0, 0.5], [1.0, 1.5, 0.999, late], [0.0, late, 0.0, -2.0]]
    samples = [sample_of(g, r, num_tokens=g + 1) for g, group in enumerate(rewards) for r in group]
    metrics = metrics_of(samples, 1.0)
    passes = [[not isinstance(r, RewardError) and r >= 1.0 for r in group] for group in rewards]
    expected = {f"validate/pass@{k}": sum(enumerated_pass_at_k(p, k) for p in passes) / 3 for k in (1, 2, 4)}
    expected |= {
        "validate/reward_mean": (1.5 + 3.499 - 2.0) / 10,
        "validate/error_share": 2 / 12,
        "validate/length_mean": (4 * 1 + 3 * 2 + 3 * 3) / 10,  # of those that have a reward
    }
    assert metrics == pytest.approx(expected, abs=1e-12)


def test_powers_of_two_up_to_the_samples_of_a_prompt():
    def names(num_samples):
        metrics = metrics_of([sample_of(0, 1.0)] * num_samples, 1.0)
        return sorted(name for name in metrics if "@" in name)

    assert names(1) == ["validate/pass@1"]
    assert names(7) == ["validate/pass@1", "validate/pass@2", "validate/pass@4"]


def test_threshold_and_nothing_scored():
    assert metrics_of([sample_of(0, 0.5)], 0.5)["validate/pass@1"] == 1.0
    assert metrics_of([sample_of(0, 0.5)], 0.51)["validate/pass@1"] == 0.0
    nothing = metrics_of([sample_of(0, RewardError("late"))], 0.0)
    assert math.isnan(nothing["validate/reward_mean"])
    assert (nothing["validate/error_share"], nothing["validate/pass@1"]) == (1.0, 0.0)


def test_when_it_is_due():
    assert not any(ValidationConfig().is_due(step) for step in range(20))
    every_third = ValidationConfig(every_n_steps=3)
    assert [step for step in range(10) if every_third.is_due(step)] == [3, 6, 9]
    at_start = ValidationConfig(every_n_steps=4, at_start=True)
    assert [step for step in range(10) if at_start.is_due(step)] == [0, 4, 8]


def test_sampling():
    run = SamplingParams(77, temperature=0.8, top_k=3, stop=["</a>"])
    given = ValidationSampling(temperature=0.6, top_p=0.9, extra={"min_p": 0.1})
    drawn = ValidationConfig(num_samples=4, sampling=given).sampling_of(run)
    assert drawn == SamplingParams(77, temperature=0.6, top_p=0.9, extra={"min_p": 0.1}, stop=("</a>",))
    assert type(drawn) is SamplingParams
    assert ValidationConfig(sampling=ValidationSampling(max_new_tokens=7)).sampling_of(run) == SamplingParams(
        7, stop=("</a>",)
    )
    assert ValidationConfig().sampling_of(run) == SamplingParams(77, temperature=0.0, stop=("</a>",))


def test_a_validation_that_is_longer_than_the_run_plans_for_is_refused():
    """Alone catches a validation past the engine's context, or past the memory that is planned for it."""
    config = ValidationConfig(sampling=ValidationSampling(max_new_tokens=78))
    with pytest.raises(ConfigError, match=r"validation\.sampling\.max_new_tokens is 78, .* 77: give at most that"):
        config.sampling_of(SamplingParams(77))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 4}, r"num_samples is 4, and greedy .*model\.validation\.sampling\.temperature above 0"),
        ({"num_samples": 4, "sampling": ValidationSampling(temperature=0.0)}, r"num_samples is 4, and greedy"),
    ],
)
def test_refusals_come_before_the_run(options, message):
    with pytest.raises(ConfigError, match=message):
        ValidationConfig(**options)


def test_each_source_of_a_mixture_is_scored_alone():
    samples = [
        replace(sample_of(group, reward), prompt=Prompt(str(group), (1,), "", source=source))
        for group, reward, source in ((0, 1.0, "a"), (1, 0.0, "b"), (2, 0.5, "b"))
    ]
    table = sample_table(Rollout(tuple(samples)), ["r"], lambda table: table, ["a", "b"])
    metrics = validation_by_source(table, ["r"], 0.5, ["a", "b"])
    assert (metrics["validate/reward_mean"], metrics["validate/a/reward_mean"], metrics["validate/b/pass@1"]) == (
        0.5,
        1,
        0.5,
    )
    assert source_metrics(table, ["a", "b"]) == {
        "source/a/share": 1 / 3,
        "source/a/reward_mean": 1.0,
        "source/a/length_mean": 1.0,
        "source/b/share": 2 / 3,
        "source/b/reward_mean": 0.25,
        "source/b/length_mean": 1.0,
    }
    assert source_metrics(table[table["source"] == 0], ["a", "b"])["source/b/share"] == 0
