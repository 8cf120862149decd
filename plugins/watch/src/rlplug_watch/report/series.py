"""Series of values to plot: smoothing, and thinning so that a run of a million steps still opens on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum, isfinite

MAX_POINTS = 2000
"""Largest number of points of a line, which is thinned beyond it: no screen shows more."""
MIN_SMOOTHED = 40
"""Smallest number of points of a line that is smoothed: a shorter one is clear as it is."""


@dataclass(frozen=True)
class Series:
    """Finite values at increasing steps. An empty series is false."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)


def smooth(series: Series) -> Series:
    """Thin ``series``, then take the centred mean over a twentieth of it (5 points at least, fewer at both ends)."""
    thinned = bucket_means(series)
    half = max(5, len(thinned) // 20) // 2
    windows = (thinned.values[max(0, i - half) : i + half + 1] for i in range(len(thinned)))
    return Series(thinned.steps, tuple(_mean(window) for window in windows))


def keep_extremes(series: Series, max_points: int = MAX_POINTS) -> Series:
    """Thin ``series`` to at most ``max_points``: the lowest and highest point of each bucket, so that spikes stay."""
    if len(series) <= max_points:
        return series
    kept: list[int] = []
    for bucket in _buckets(len(series), max_points // 2):
        kept += sorted({min(bucket, key=series.values.__getitem__), max(bucket, key=series.values.__getitem__)})
    return Series(tuple(series.steps[i] for i in kept), tuple(series.values[i] for i in kept))


def bucket_means(series: Series, max_points: int = MAX_POINTS) -> Series:
    """Thin ``series`` to at most ``max_points`` means; series with the same steps keep having the same steps."""
    if len(series) <= max_points:
        return series
    buckets = list(_buckets(len(series), max_points))
    means = tuple(_mean(series.values[bucket.start : bucket.stop]) for bucket in buckets)
    return Series(tuple(series.steps[bucket[len(bucket) // 2]] for bucket in buckets), means)


def _mean(values: tuple[float, ...]) -> float:
    total = sum(values)
    # The sum of exploded gradient norms may be infinite while their mean is finite: divide each one first then.
    return total / len(values) if isfinite(total) else fsum(value / len(values) for value in values)


def _buckets(length: int, count: int) -> Iterator[range]:
    for index in range(count):
        yield range(index * length // count, (index + 1) * length // count)
