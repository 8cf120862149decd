"""Scores on held-out prompts: mean reward and pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlplug.training.samples.metrics import SampleTable, scored_rows
from rlplug.types import ENVIRONMENT, reaches


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate without bias the chance that one of ``k`` samples passes, ``1 - C(n - c, k) / C(n, k)``.

    Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def validation_by_source(
    table: SampleTable, reward_names: Sequence[str], pass_threshold: float, sources: Sequence[str]
) -> dict[str, float]:
    """Return :func:`validation_metrics` of all prompts, and of each source as ``validate/<source>/...``."""
    metrics = validation_metrics(table, reward_names, pass_threshold)
    for index, name in enumerate(sources):
        found = validation_metrics(table[table["source"] == index], reward_names, pass_threshold)
        metrics |= {f"validate/{name}/{key.removeprefix('validate/')}": value for key, value in found.items()}
    return metrics


def validation_metrics(table: SampleTable, reward_names: Sequence[str], pass_threshold: float) -> dict[str, float]:
    """Return means over the samples that have a reward, and pass@k over all prompts; a failed sample is no pass.

    Args:
        table: The samples of all ranks; not empty.
        reward_names: Names of the rewards.
        pass_threshold: Smallest reward of a sample that passes.

    Returns:
        ``validate/reward_mean``, its 95% interval over prompts as ``validate/reward_low`` and ``.../reward_high`` where
        one can be stated, ``validate/error_share``, ``validate/length_mean`` in tokens, with an environment
        ``validate/turns_mean``, and ``validate/pass@k`` for k = 1, 2, 4, ... up to the samples of a prompt.
    """
    from rlplug.observability.intervals import mean_over

    scored = scored_rows(table)
    rewards = scored["reward"].tolist()
    metrics = {
        "validate/reward_mean": sum(rewards) / len(rewards) if rewards else math.nan,
        "validate/error_share": 1 - len(rewards) / len(table),
    }
    if rewards:
        metrics["validate/length_mean"] = int(scored["num_tokens"].sum()) / len(scored)
    if rewards and ENVIRONMENT in reward_names:
        metrics["validate/turns_mean"] = int(scored["num_turns"].sum()) / len(scored)
    groups, sizes = np.unique(scored["group"], return_inverse=True, return_counts=True)[1:]
    means = (np.bincount(groups, scored["reward"]) / sizes).tolist()
    if (estimate := mean_over(means, rewards)) is not None and estimate.low is not None and estimate.high is not None:
        metrics |= {"validate/reward_low": estimate.low, "validate/reward_high": estimate.high}
    sizes = np.unique(table["group"], return_counts=True)[1].tolist()
    starts = np.cumsum([0, *sizes[:-1]])
    passed = np.add.reduceat(reaches(table["reward"], pass_threshold), starts, dtype=np.int64).tolist()
    k = 1
    while k <= sizes[0]:
        chances = [pass_at_k(size, num, k) for size, num in zip(sizes, passed, strict=True)]
        metrics[f"validate/pass@{k}"] = sum(chances) / len(chances)
        k *= 2
    return metrics
