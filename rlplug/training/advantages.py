"""The phase ``advantages``: what an algorithm makes of rewards, checked and put into the rows that train."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlplug.errors import RunError
from rlplug.interfaces.algorithm import Algorithm
from rlplug.types import StepBatch


def compute_advantages(
    algorithm: Algorithm, batch: StepBatch, gather: Callable[[list[Any]], list[Any]]
) -> tuple[StepBatch, dict[str, float]]:
    """Return the rows with advantages, and the algorithm's metrics. Collective.

    Args:
        algorithm: Algorithm of the run.
        batch: This rank's rows.
        gather: Returns the concatenation of all ranks' lists.

    Raises:
        RunError: A tensor has a wrong shape, or ranks have different metrics.
    """
    name = type(algorithm).__name__
    result = algorithm.advantages(batch)
    _require_equal(name, gather([result.metrics]))
    mask = {} if result.response_mask is None else {"response_mask": result.response_mask}
    try:
        return batch.replace(**mask, advantages=result.advantages, returns=result.returns), result.metrics
    except ValueError as problem:
        raise RunError(f"{name}.advantages: {problem}") from None


def require_rows(edited: Any, batch: StepBatch) -> StepBatch:
    """Return what the hook ``rlplug_prepare_batch`` made of a rank's rows.

    Raises:
        RunError: It is no batch, or one of other rows.
    """
    if not isinstance(edited, StepBatch) or not np.array_equal(edited.lengths, batch.lengths):
        found = f"{edited.num_sequences} other rows" if isinstance(edited, StepBatch) else type(edited).__name__
        raise RunError(
            f"A plugin's rlplug_prepare_batch returned {found} for a StepBatch of {batch.num_sequences} rows: return "
            "what the yield gives, or batch.replace(...) of it. rlplug plugins lists who implements the hook."
        )
    return edited


def _require_equal(algorithm: str, metrics: Sequence[dict[str, float]]) -> None:
    for rank, found in enumerate(metrics):
        for name in metrics[0].keys() | found.keys():
            first, other = metrics[0].get(name), found.get(name)
            is_equal = first == other or (first is not None and other is not None and math.isnan(first + other))
            if not is_equal:
                raise RunError(
                    f"{algorithm}.advantages returns {name} = {first} on rank 0 and {other} on rank {rank}: a rank has "
                    "a part of the step's completions. Compute it with batch.step.mean, .sum or .moments."
                )
