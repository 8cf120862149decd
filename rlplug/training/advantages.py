"""The phase ``advantages``: what an algorithm makes of rewards, checked and put into the rows that train."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rlplug.interfaces.algorithm import Algorithm
from rlplug.interfaces.checks.algorithms import accept_advantages
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.metrics import read_metrics
from rlplug.interfaces.checks.process_state import watched
from rlplug.types import StepBatch


def compute_advantages(
    algorithm: Algorithm, batch: StepBatch, gather: Callable[[list[Any]], list[Any]]
) -> tuple[StepBatch, dict[str, float]]:
    """Return the rows with advantages, and the algorithm's metrics. Collective.

    Raises:
        RunError: A tensor does not fit the rows, a metric is no number, or ranks have different metrics.
    """
    call = PluginCall(algorithm, "advantages")
    with watched(call):
        result = algorithm.advantages(batch)
        rows = accept_advantages(call, result, batch)
    metrics = read_metrics(call, result.metrics)
    _require_equal(call, gather([metrics]))
    return rows, metrics


def _require_equal(call: PluginCall, metrics: Sequence[dict[str, float]]) -> None:
    for rank, found in enumerate(metrics):
        for name in metrics[0].keys() | found.keys():
            first, other = metrics[0].get(name), found.get(name)
            is_equal = first == other or (first is not None and other is not None and math.isnan(first + other))
            if not is_equal:
                raise call.violation(
                    "return the same metrics on all ranks, each of which has a part of the step's completions",
                    f"returned {name} = {first} on rank 0 and {other} on rank {rank}: compute it with "
                    "batch.step.mean, .sum or .moments",
                )
