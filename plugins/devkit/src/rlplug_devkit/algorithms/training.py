"""Steps of a run, as an algorithm sees them: it selects, weighs, learns, and observes the metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlplug.interfaces.algorithm import Advantages, Algorithm, RunInfo
from rlplug.types import StepBatch, groups_of
from rlplug_devkit.algorithms.passes import Learned, advantages_of_rows, difference, is_close, joined, learn, step_of
from rlplug_devkit.algorithms.steps import batch_of, make_rows

GARBAGE = 77
"""What is written into tensors that a step no longer needs."""


class MetricsChanged(Exception):
    """An algorithm wrote into the metrics that it observes."""


def train(
    algorithm: Algorithm, run: RunInfo, first: int, last: int, spoils: bool = False
) -> list[tuple[list[str], Learned]]:
    """Take steps as a run does, and return which rows each selected, and what it learned.

    Args:
        algorithm: The algorithm, after its ``setup``.
        run: The run.
        first: Number of the first step, from which its completions are drawn.
        last: Number of the step behind the last one.
        spoils: Overwrite what a step's calls were given, when the step is over.

    Raises:
        MetricsChanged: ``after_step`` wrote into its argument.
    """
    results = []
    for number in range(first, last):
        rows = make_rows(number, run.group_size, run.max_new_tokens)
        groups = [list(group) for group in groups_of([row.sample for row in rows])]
        chosen = {id(sample) for group in groups for sample in algorithm.select(group)}
        kept = [row for row in rows if id(row.sample) in chosen]
        batch = batch_of(kept, algorithm.needs)
        advantages = algorithm.advantages(batch)
        step = step_of(algorithm, kept, advantages)
        learned = learn(step, step.all_rows)
        results.append(([str(index) for index, row in enumerate(rows) if id(row.sample) in chosen], learned))
        metrics = metrics_of_step(number, advantages, learned)
        given = dict(metrics)
        algorithm.after_step(given)
        if given != metrics and not any(map(math.isnan, metrics.values())):
            raise MetricsChanged(f"after_step changed the metrics {sorted(dict(given.items() ^ metrics.items()))}")
        if spoils:
            given.clear()
            for group in groups:
                group.clear()
            spoil(batch)
            spoil(step.batch)
    return results


def metrics_of_step(number: int, advantages: Advantages, learned: Learned) -> dict[str, float]:
    """Return metrics of a step, of which a run has these and more."""
    loop = {"loss": float(learned.loss), "reward/mean": 0.5, "grad_norm": 1.0, "step": float(number + 1)}
    return {**loop, **advantages.metrics, **learned.metrics, **learned.maxima, **learned.minima}


def spoil(batch: StepBatch) -> None:
    """Overwrite the arrays of a batch, and the tensors that were made of them."""
    for array in (*batch.per_sequence.values(), *batch.per_token.values()):
        if array.flags.writeable:
            array[...] = GARBAGE
    for tensor in batch.tokens.tensors().values():
        tensor.detach().fill_(GARBAGE)


def trained_otherwise(
    found: list[tuple[list[str], Learned]], expected: list[tuple[list[str], Learned]], tolerance: float
) -> str:
    """Return in words how steps differ; empty where they do not."""
    for (chosen, learned), (others, other) in zip(found, expected, strict=True):
        differs = "it selects other samples" if chosen != others else difference(learned, other, tolerance)
        if differs:
            return differs
    return ""


def weighed_otherwise(
    part: Advantages, whole: Advantages, mine: StepBatch, rows: StepBatch, indices: list[int], tolerance: float
) -> str:
    """Return in words how a rank's advantages differ from ``indices`` of those of one rank that has all rows."""
    if part.metrics.keys() != whole.metrics.keys():
        return f"metrics have the names {sorted(part.metrics)}, and on one rank {sorted(whole.metrics)}"
    for metric, value in part.metrics.items():
        if not math.isclose(value, whole.metrics[metric], rel_tol=1e-5, abs_tol=1e-6):
            return f"the metric {metric} is {value:.6g}, and on one rank {whole.metrics[metric]:.6g}"
    return tensors_otherwise(part, whole, mine, rows, indices, tolerance)


def tensors_otherwise(
    part: Advantages, whole: Advantages, mine: StepBatch, rows: StepBatch, indices: list[int], tolerance: float
) -> str:
    """Return in words how tensors of ``part`` differ from ``indices`` of those of ``whole``."""
    for name in ("of_sequences", "of_tokens", "returns", "trains"):
        here, there = getattr(part, name), getattr(whole, name)
        if (here is None) != (there is None):
            return f"{name} is missing on one of them"
        if here is None or not indices:
            continue
        if name != "of_sequences":
            there = list(there.split(rows.num_tokens.tolist()))
        expected = joined([there[index] for index in indices])
        if not is_close(here.float(), expected, tolerance):
            return f"{name} differ from those of one rank with the same completions"
    return ""


def numbers_of(result: Advantages, batch: StepBatch) -> dict[str, Any]:
    """Return all that an algorithm said of a batch, as a dict that can be compared with another of the same rows."""
    named: Mapping[str, Any] = {name: getattr(result, name) for name in ("returns", "trains")}
    return {
        "advantages": joined(advantages_of_rows(batch, result)),
        **{name: value.float() for name, value in named.items() if value is not None},
        "metrics": dict(result.metrics),
    }
