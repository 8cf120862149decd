"""What every rank knows of all samples of a step: numbers, by which metrics are computed and samples are chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplug.types import RewardError, Rollout, Sample

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
