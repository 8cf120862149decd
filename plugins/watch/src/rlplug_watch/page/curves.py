"""Curves to compare: values over steps, samples, tokens or seconds, and thinned to what a screen can show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from rlplug_watch.metrics_file import Column, MetricsFile, last_values

Axis: TypeAlias = Literal["step", "samples", "tokens", "seconds"]
AXES: Final[tuple[Axis, ...]] = get_args(Axis)
SUMMED: Final = {"tokens": "completion/num_tokens", "seconds": "time/step"}
"""Column whose sum up to a step is the place of the step on an axis."""
OVERVIEW: Final = (
    *("reward/mean", "validate/pass@1", "completion/length_mean", "completion/truncated_share"),
    *("throughput/tokens_per_s", "time/step", "policy/entropy", "policy/kl", "policy/grad_norm", "mismatch/mean"),
    *("advantages/degenerate_groups", "partial/staleness_mean"),
)
"""Metrics of the first charts."""

ROUGH_POINTS: Final = 100
"""Rows that are read of a file for the first look at a curve."""


@dataclass(frozen=True)
class Curve:
    """Points of a curve, thinned to buckets with equally many points.

    ``x`` and ``y`` are the lowest and the highest point of each bucket, in their order, so that spikes stay.
    ``mean_x`` and ``mean_y`` are the buckets' means, to be smoothed. Where nothing is thinned, both are the points.
    """

    x: list[float]
    y: list[float]
    mean_x: list[float]
    mean_y: list[float]
    per_bucket: float
    """Number of points in a bucket."""


def read_curve(file: MetricsFile, metric: str, axis: Axis, samples_per_step: int | None, buckets: int) -> Curve | None:
    """Return the curve of a metric, or ``None`` where the run has no value of it or nothing for the axis.

    Args:
        file: The run's metrics.
        metric: Name of a column.
        axis: What is to the right; ``seconds`` are those in steps, summed.
        samples_per_step: Completions of a step; the axis ``samples`` needs them.
        buckets: Largest number of buckets.
    """
    columns = file.columns([metric, *SUMMED.values()])
    if metric not in columns or (axis == "samples" and samples_per_step is None):
        return None
    if axis in SUMMED and SUMMED[axis] not in columns:
        return None
    steps, y = last_values(columns, metric)
    if axis == "step":
        x = steps
    elif axis == "samples":
        assert samples_per_step is not None
        x = steps * samples_per_step
    else:
        measured, values = last_values(columns, SUMMED[axis])
        totals = np.concatenate(([0.0], np.cumsum(values)))
        x = totals[np.searchsorted(measured, steps, side="right")]
    return thin(x, y, buckets) if len(y) else None


def read_rough_curve(
    file: MetricsFile, metric: str, axis: Axis, samples_per_step: int | None, buckets: int
) -> Curve | None:
    """Return some points of a curve, spread over a file that is not read whole; ``None`` for an axis that needs all.

    Arguments are those of :func:`read_curve`, which is called where the columns are in memory.
    """
    if file.is_read:
        return read_curve(file, metric, axis, samples_per_step, buckets)
    scale = {"step": 1, "samples": samples_per_step}.get(axis)
    if scale is None:
        return None
    steps, y = last_values(
        dict(zip(("step", metric), file.sampled(metric, min(buckets, ROUGH_POINTS)), strict=True)), metric
    )
    return thin(steps * scale, y, buckets) if len(y) else None


def thin(x: Column, y: Column, buckets: int) -> Curve:
    """Return at most ``buckets`` buckets of a curve with finite values."""
    count = len(x)
    if count <= buckets:
        points = (x.tolist(), _short(y))
        return Curve(*points, *points, per_bucket=1.0)
    edges = np.arange(buckets + 1) * count // buckets
    starts, sizes = edges[:-1], np.diff(edges)
    lows, highs = np.empty(buckets, np.int64), np.empty(buckets, np.int64)
    for index, (start, end) in enumerate(zip(starts, edges[1:], strict=True)):
        bucket = y[start:end]
        lows[index], highs[index] = start + bucket.argmin(), start + bucket.argmax()
    kept = np.unique(np.concatenate((lows, highs)))
    means = [np.add.reduceat(values / np.repeat(sizes, sizes), starts) for values in (x, y)]
    return Curve(x[kept].tolist(), _short(y[kept]), _short(means[0]), _short(means[1]), count / buckets)


def _short(values: Column) -> list[float]:
    """Return values with six significant digits, of which a screen shows fewer."""
    return [float(f"{value:.6g}") for value in values.tolist()]
