"""Scores on held-out prompts: mean reward and pass@k."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

import numpy as np

from rlplug.training.samples.metrics import SampleTable
from rlplug.types import ENVIRONMENT
from rlplug.types.ranges import reaches

Z: Final = statistics.NormalDist().inv_cdf(0.975)
"""Quantile of the normal distribution for intervals of 95%."""
LEAST_PROMPTS: Final = 4
"""Fewest prompts of which an interval of a mean is stated."""


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
    """Return mean reward over the samples that have one, and pass@k over prompts; a failed reward is no pass.

    Args:
        table: The samples of all ranks; not empty.
        reward_names: Names of the rewards.
        pass_threshold: Smallest reward of a sample that passes.

    Returns:
        ``validate/reward_mean``, half of its 95% interval over prompts as ``validate/reward_margin`` where there are
        enough, ``validate/error_share``, ``validate/length_mean`` in tokens, with an environment
        ``validate/turns_mean``, and ``validate/pass@k`` for k = 1, 2, 4, ... up to the samples of a prompt.
    """
    scored = table["reward"][~np.isnan(table["reward"])].tolist()
    metrics = {
        "validate/reward_mean": sum(scored) / len(scored) if scored else math.nan,
        "validate/error_share": 1 - len(scored) / len(table),
        "validate/length_mean": int(table["num_tokens"].sum()) / len(table),
    }
    if ENVIRONMENT in reward_names:
        metrics["validate/turns_mean"] = int(table["num_turns"].sum()) / len(table)
    sizes = np.unique(table["group"], return_counts=True)[1].tolist()
    starts = np.cumsum([0, *sizes[:-1]])
    sums = np.add.reduceat(np.nan_to_num(table["reward"]), starts)
    num_scored = np.add.reduceat(~np.isnan(table["reward"]), starts, dtype=np.int64)
    means = (sums[num_scored > 0] / num_scored[num_scored > 0]).tolist()
    if len(means) >= LEAST_PROMPTS:
        metrics["validate/reward_margin"] = margin_of(means)
    passed = np.add.reduceat(reaches(table["reward"], pass_threshold), starts, dtype=np.int64).tolist()
    k = 1
    while k <= sizes[0]:
        chances = [pass_at_k(size, num, k) for size, num in zip(sizes, passed, strict=True)]
        metrics[f"validate/pass@{k}"] = sum(chances) / len(chances)
        k *= 2
    return metrics


def margin_of(values: Sequence[float]) -> float:
    """Return half of the 95% interval of the mean of values, one a prompt, by Student's t."""
    return student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def student_t(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t distribution, within 0.5% from 3 degrees of freedom on.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.5.
    """
    z, n = Z, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / n**power for power, term in enumerate(terms, start=1))
