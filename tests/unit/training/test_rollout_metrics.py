"""Metrics of scored samples, against NumPy."""

from __future__ import annotations

import math

import numpy
import pytest

from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.hooks import GivenMetrics
from rlplug.training.samples.metrics import means_over_ranks, rollout_metrics, sample_table
from rlplug.types import Prompt, RewardError, Rollout, Sample

LATE = RewardError("late")


def sample_of(num_tokens, reason, reward, group=0, **rewards):
    return Sample(
        prompt=Prompt(uid="p", token_ids=(1, 2), text=""),
        group=group,
        token_ids=(1, 2) + (3,) * num_tokens,
        response_mask=(False, False) + (True,) * num_tokens,
        rollout_logprobs=(0.0,) * (2 + num_tokens),
        completion="",
        finish_reason=reason,
        policy_version=0,
        rewards=rewards,
        reward=reward,
    )


def metrics_of(rollout):
    """The metrics of a rollout that two ranks have, the second one half of it."""
    names = list(rollout.drawn[0].rewards)
    parts = [
        Rollout(*(getattr(rollout, kind)[rank::2] for kind in ("samples", "rejected", "surplus"))) for rank in (0, 1)
    ]
    tables = [sample_table(part, names, lambda table: table) for part in parts]
    return rollout_metrics(sample_table(parts[0], names, lambda _: numpy.concatenate(tables)), names)


def test_metrics():
    samples = [
        sample_of(3, "stop", 0.5, right=1.0, short=-0.5),
        sample_of(8, "length", 2.0, right=1.0, short=1.0),
        sample_of(0, "abort", math.nan, right=LATE, short=0.25),
        sample_of(1, "length", -1.0, right=0.0, short=-1.0),
    ]
    rollout = Rollout(samples=tuple(samples[:3]), rejected=tuple(samples[3:]))  # selection changes no other metric
    assert metrics_of(rollout) == pytest.approx(
        {
            "reward/mean": numpy.mean([0.5, 2.0, -1.0]),
            "reward/std": numpy.std([0.5, 2.0, -1.0]),
            "reward/min": -1.0,
            "reward/max": 2.0,
            "reward/error_share": 0.25,
            "reward/right": numpy.mean([1.0, 1.0, 0.0]),
            "reward/right/error_share": 0.25,
            "reward/short": numpy.mean([-0.5, 1.0, 0.25, -1.0]),
            "reward/short/error_share": 0.0,
            **{f"reward/right/p{p}": numpy.quantile([1.0, 1.0, 0.0], p / 100) for p in (10, 50, 90)},
            **{f"reward/short/p{p}": numpy.quantile([-0.5, 1.0, 0.25, -1.0], p / 100) for p in (10, 50, 90)},
            "completion/num_tokens": 12.0,
            "completion/num_samples": 4.0,
            "completion/length_mean": 4.0,  # over the three that have a reward
            "completion/length_max": 8.0,
            "completion/truncated_share": 2 / 3,
            "filter/kept_share": 0.75,
            "filter/rejected_groups": 0.0,
        }
    )


def test_rejected_groups_are_counted_among_those_that_the_algorithm_saw():
    samples = [sample_of(1, "stop", 1.0, group=group, right=1.0) for group in (0, 0, 1, 2, 3, 4)]
    rollout = Rollout(samples=tuple(samples[:1]), rejected=tuple(samples[1:4]), surplus=tuple(samples[4:]))
    metrics = metrics_of(rollout)
    assert metrics["filter/rejected_groups"] == pytest.approx(2 / 3)  # 1 and 2, of 0, 1 and 2
    assert metrics["filter/kept_share"] == pytest.approx(1 / 6)
    assert metrics["completion/num_tokens"] == 6


def test_a_reward_that_always_failed_has_no_mean():
    metrics = metrics_of(Rollout((sample_of(2, "stop", math.nan, right=LATE, short=1.0),)))
    assert metrics["reward/error_share"] == 1.0
    assert metrics["reward/short"] == 1.0
    of_scored = {"completion/length_mean", "completion/length_max", "completion/truncated_share"}
    assert not ({"reward/mean", "reward/std", "reward/right"} | of_scored) & set(metrics)


def test_a_metric_of_ranks_is_the_mean_over_their_samples():
    """A call that gave no metric on a rank takes no part there; the names stay those of their calls."""
    others = [("p", {"a": 3.0}, 1), ("q", {"a": 7.0}, 1)]
    means = means_over_ranks([GivenMetrics(PluginCall("p"), {"a": 1.0, "b": 5.0})], 3, lambda mine: mine + others)
    assert [(str(given.call), dict(given)) for given in means] == [("p", {"a": 1.5, "b": 5.0}), ("q", {"a": 7.0})]
