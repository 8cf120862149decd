"""How noisy the rewards of a step are: ties and unequal values of equal completions, and failures by kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlplug.types import RewardError, Sample

KINDS: Final = ("late", "raised", "invalid", "refused")
"""Kinds of failures, as :class:`rlplug.types.RewardError` has them."""
ROUND_OFF: Final = 1e-8
"""Deviation of values, as a share of their size, that counts as none."""

Floats = NDArray[np.float64]
Keys = NDArray[np.int64]


def reward_statistics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return statistics of samples of whole groups.

    Returns:
        ``reward/<name>/ties``, the share of pairs of a prompt's samples with the same value; ``reward/<name>/noise``,
        the variance of that reward among equal completions of a prompt over that among all of its completions, where
        there are equal ones; ``reward_errors/<kind>``, the share of samples whose first error is such a one.
    """
    groups = np.array([sample.group for sample in samples], np.int64)
    texts: dict[tuple[int, str], int] = {}
    text = np.array([texts.setdefault((each.group, each.completion), len(texts)) for each in samples], np.int64)
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for sample in samples for name in sample.rewards):
        values = np.array([_number(sample.rewards.get(name)) for sample in samples])
        valid = ~np.isnan(values)
        if (pairs := _pairs(groups[valid])) == 0:
            continue
        found[f"reward/{name}/ties"] = _pairs(np.stack([groups[valid], values[valid]], axis=1)) / pairs
        among_all, among_equal = (_variance(values[valid], keys[valid]) for keys in (groups, text))
        least = (ROUND_OFF * np.abs(values[valid]).max()) ** 2
        if among_all is not None and among_equal is not None and among_all > least:
            found[f"reward/{name}/noise"] = among_equal / among_all
    failed = [next(iter(sample.errors.values())).kind for sample in samples if sample.errors]
    return found | {f"reward_errors/{kind}": failed.count(kind) / len(samples) for kind in KINDS}


def _number(value: float | RewardError | None) -> float:
    return value if isinstance(value, int | float) else math.nan


def _pairs(rows: NDArray[Any]) -> int:
    """Return the number of pairs of equal rows."""
    counts = np.unique(rows, axis=0, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _variance(values: Floats, keys: Keys) -> float | None:
    """Return the variance of values about the means of their keys, pooled; ``None`` where no key has two values."""
    of_row, sizes = np.unique(keys, return_inverse=True, return_counts=True)[1:]
    if len(sizes) == len(values):
        return None
    centred = values - (np.bincount(of_row, values) / sizes)[of_row]
    return float(np.square(centred).sum() / (len(values) - len(sizes)))
