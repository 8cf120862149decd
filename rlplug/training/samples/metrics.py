"""What every rank knows of all samples of a step, as a table, and metrics of it, which loggers and the report show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.hooks import GivenMetrics
from rlplug.types import ENVIRONMENT, RewardError, Rollout, Sample

SampleTable = NDArray[Any]
"""Structured array with a row for each sample, by ascending group; see :func:`sample_table`."""

GatherArrays = Callable[[NDArray[Any]], NDArray[Any]]
"""Returns the concatenation of all ranks' arrays; collective."""


def sample_table(
    rollout: Rollout, reward_names: Sequence[str], gather_arrays: GatherArrays, sources: Sequence[str] = ()
) -> SampleTable:
    """Return a row for each sample of all ranks, by ascending group. Collective.

    Args:
        rollout: This rank's samples.
        reward_names: Names of the rewards, the same on all ranks.
        gather_arrays: Returns the concatenation of all ranks' arrays.
        sources: Names of the sources of a mixture, the same on all ranks.

    Returns:
        Fields ``group``; ``trains`` and ``is_surplus``; ``reward``, NaN where one failed; ``values`` [rewards], NaN of
        a failed one; ``num_tokens`` of the response; ``is_truncated``; ``num_turns``; ``source``, an index of
        ``sources`` or -1.
    """
    dtype = np.dtype(
        [
            *((name, np.int64) for name in ("group", "num_tokens", "num_turns", "source")),
            *((name, np.bool_) for name in ("trains", "is_surplus", "is_truncated")),
            ("reward", np.float64),
            ("values", np.float64, (len(reward_names),)),
        ]
    )
    table = np.zeros(len(rollout.drawn), dtype)
    table["trains"][: len(rollout.samples)] = True
    table["is_surplus"][len(table) - len(rollout.surplus) :] = True
    indices = {name: index for index, name in enumerate(sources)}
    for row, sample in zip(table, rollout.drawn, strict=True):
        row["group"], row["num_tokens"], row["num_turns"] = sample.group, sample.num_response_tokens, sample.num_turns
        row["is_truncated"] = sample.finish_reason == "length"
        row["source"] = indices.get(sample.prompt.source, -1)
        row["reward"] = math.nan if sample.errors else sample.reward
        row["values"] = [_number(sample, name) for name in reward_names]
    found = gather_arrays(table)
    return found[np.argsort(found["group"], kind="stable")]


def _number(sample: Sample, name: str) -> float:
    value = sample.rewards[name]
    return math.nan if isinstance(value, RewardError) else value


def scored_rows(table: SampleTable) -> SampleTable:
    """Return the samples that have a reward: one that failed counts as an error, and in no mean."""
    scored: SampleTable = table[~np.isnan(table["reward"])]
    return scored


def rollout_metrics(table: SampleTable, reward_names: Sequence[str], sources: Sequence[str] = ()) -> dict[str, float]:
    """Summarise all samples of a step, selected or not.

    Args:
        table: The samples of all ranks; not empty.
        reward_names: Names of the rewards.
        sources: Names of the prompts' sources, where there are several.

    Returns:
        Over samples that have a reward: rewards, lengths in tokens, how completions ended, turns with an environment.
        Over all: errors, tokens, samples, the shares of samples that train and of groups that the algorithm rejected.
    """
    num_seen = len(np.unique(table["group"][~table["is_surplus"]]))
    num_groups = len(np.unique(table["group"][table["trains"]]))
    scored, num_samples = scored_rows(table), len(table)
    rewards, lengths, turns = (scored[name].tolist() for name in ("reward", "num_tokens", "num_turns"))
    metrics = {
        "reward/error_share": 1 - len(scored) / num_samples,
        "completion/num_tokens": float(table["num_tokens"].sum()),
        "completion/num_samples": float(num_samples),
        "filter/kept_share": int(table["trains"].sum()) / num_samples,
        "filter/rejected_groups": 1 - num_groups / num_seen,
    }
    if rewards:
        metrics["reward/mean"], metrics["reward/std"] = statistics.fmean(rewards), statistics.pstdev(rewards)
        metrics["reward/min"], metrics["reward/max"] = min(rewards), max(rewards)
        metrics |= {"completion/length_mean": statistics.fmean(lengths), "completion/length_max": float(max(lengths))}
        metrics["completion/truncated_share"] = int(scored["is_truncated"].sum()) / len(scored)
    if rewards and ENVIRONMENT in reward_names:
        metrics |= {"turns/mean": statistics.fmean(turns), "turns/max": float(max(turns))}
    for name, values in zip(reward_names, table["values"].T, strict=True):
        if len(known := values[~np.isnan(values)]):
            metrics[f"reward/{name}"] = statistics.fmean(known.tolist())
            metrics |= {f"reward/{name}/p{percent}": float(np.percentile(known, percent)) for percent in (10, 50, 90)}
        metrics[f"reward/{name}/error_share"] = 1 - len(known) / num_samples
    return metrics | source_metrics(table, sources)


def source_metrics(table: SampleTable, sources: Sequence[str]) -> dict[str, float]:
    """Return ``source/<name>/share`` of the step's groups, and the mean reward and length of each source's samples."""
    num_groups = len(np.unique(table["group"]))
    metrics = {}
    for index, name in enumerate(sources):
        rows = table[table["source"] == index]
        metrics[f"source/{name}/share"] = len(np.unique(rows["group"])) / num_groups
        if len(scored := scored_rows(rows)):
            metrics[f"source/{name}/reward_mean"] = statistics.fmean(scored["reward"].tolist())
            metrics[f"source/{name}/length_mean"] = statistics.fmean(scored["num_tokens"].tolist())
    return metrics


def means_over_ranks(
    found: Sequence[GivenMetrics], num_samples: int, gather: Callable[[Any], Any]
) -> list[GivenMetrics]:
    """Return the metrics of plugins' calls as means over ranks, weighted by ``num_samples``. Collective."""
    everyone = gather([(str(given.call), dict(given), num_samples) for given in found])
    by_call: dict[str, list[tuple[Mapping[str, float], int]]] = {}
    for call, metrics, weight in everyone:
        by_call.setdefault(call, []).append((metrics, weight))
    return [GivenMetrics(PluginCall(call), _weighted_means(of_ranks)) for call, of_ranks in by_call.items()]


def _weighted_means(found: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Return the weighted mean of each metric over those that have it, given the metrics and weight of each."""
    names = dict.fromkeys(name for metrics, _ in found for name in metrics)
    means = {}
    for name in names:
        having = [(metrics[name], weight) for metrics, weight in found if name in metrics]
        means[name] = sum(value * weight for value, weight in having) / sum(weight for _, weight in having)
    return means
