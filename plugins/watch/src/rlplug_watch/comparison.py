"""Compares two runs by their files: which metrics differ by more than their noise, and what was set otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from rlplug.errors import ConfigError
from rlplug.observability.intervals import Estimate, difference_of
from rlplug_watch.config_values import flat_config
from rlplug_watch.own_files import own_path
from rlplug_watch.report.run_data import CONFIG_FILE, RUN_FILE, Metrics, read_info, read_metrics, run_name
from rlplug_watch.report.series import Series

RESAMPLES: Final = 2000
MIN_STEPS: Final = 8
"""Least number of steps of each run from which an interval is estimated."""
TOLERANCE: Final = 0.02
"""Largest relative change that counts as none by default."""
HIGHER, LOWER, NEITHER = 1, -1, 0
KINDS: Final[Mapping[str, int]] = {
    "reward/mean": HIGHER,
    "validate/reward_mean": HIGHER,
    "throughput/tokens_per_s": HIGHER,
    "time/step": LOWER,
    "mismatch/mean": LOWER,
    "loss": NEITHER,
}
"""Metrics that are compared, and which values are better. Of memory, the peak over all phases is added."""
ENDS: Final = ("_low", "_high")
"""What the names of a validation's interval have instead of ``_mean``."""
MEMORY: Final = "memory"
PLACES: Final = {"run.dir", "run.name", "trainer.default_root_dir"}
"""Keys that differ between any two runs."""


@dataclass(frozen=True)
class Row:
    """A metric of two runs over the same steps."""

    name: str
    before: float
    after: float
    interval: tuple[float, float] | None
    """That of 95% of the difference; ``None`` where it cannot be estimated."""
    verdict: str
    """``better``, ``worse``, ``differs`` (where neither is better), ``same``; empty where there is no interval."""

    @property
    def change(self) -> float:
        """Difference relative to the first run; infinite where that has 0, and 0 where both have."""
        if self.after == self.before:
            return 0.0
        return (self.after - self.before) / abs(self.before) if self.before else math.copysign(math.inf, self.after)


@dataclass(frozen=True)
class Difference:
    """A key of the configuration, or a package, whose values differ; ``None`` where a run has none."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Comparison:
    """What two runs have otherwise than each other."""

    names: tuple[str, str]
    steps: tuple[int, int]
    """First and last step that both have and that are compared."""
    rows: Sequence[Row]
    config: Sequence[Difference]
    versions: Sequence[Difference]
    notes: Sequence[str]

    @property
    def is_worse(self) -> bool:
        """Whether any metric of the second run is worse."""
        return any(row.verdict == "worse" for row in self.rows)


def compare_runs(
    folders: tuple[Path, Path],
    metrics: Sequence[str] = (),
    steps: tuple[int, int] | None = None,
    tolerance: float = 0.0,
) -> Comparison:
    """Compare the second run with the first.

    Args:
        folders: Of both runs.
        metrics: Names of further metrics, of which neither value is better.
        steps: First and last step that are compared; by default the second half of those that both have.
        tolerance: Largest relative change that counts as none.

    Raises:
        ConfigError: A folder is no run's, the runs have no step in common, or a metric is in neither.
    """
    notes: list[str] = []
    read = [read_metrics(folder, notes) for folder in folders]
    first, last = steps or second_half(read, folders)
    rows = []
    for name in [*KINDS, *(each for each in metrics if each not in KINDS)]:
        pair = [within(each.series(name), first, last) for each in read]
        if all(pair):
            ends = [[within(each.series(name.replace("_mean", end)), first, last) for end in ENDS] for each in read]
            rows.append(compare_series(name, pair[0], pair[1], ends, tolerance))
        elif name in metrics:
            raise ConfigError(f"--metrics {name}: not both runs have it in steps {first} to {last}.")
        elif any(pair):
            notes.append(f"{name} is in one of the runs alone.")
    before, after = (peak_memory(each, first, last) for each in read)
    if before is not None and after is not None:
        exact = (after - before, after - before)
        rows.append(Row(MEMORY, before, after, exact, verdict(LOWER, before, after, exact, tolerance)))
    if not rows:
        raise ConfigError(f"the runs have no metric in common in steps {first} to {last}.")
    infos = [read_info(own_path(folder, RUN_FILE), notes) for folder in folders]
    versions = [info.get("versions") for info in infos]
    return Comparison(
        names=(run_name(folders[0].resolve()), run_name(folders[1].resolve())),
        steps=(first, last),
        rows=rows,
        config=differences(*(flat_config(own_path(folder, CONFIG_FILE)) for folder in folders)),
        versions=differences(*(each if isinstance(each, Mapping) else {} for each in versions)),
        notes=notes,
    )


def second_half(read: Sequence[Metrics], folders: tuple[Path, Path]) -> tuple[int, int]:
    """Return the first and the last step of the second half of those that both runs have."""
    common = sorted(set(read[0].steps) & set(read[1].steps))
    if not common:
        lengths = " and ".join(f"{folder} has {len(each.steps)}" for folder, each in zip(folders, read, strict=True))
        raise ConfigError(f"the runs have no step in common: {lengths}.")
    return common[len(common) // 2], common[-1]


def within(series: Series, first: int, last: int) -> Series:
    """Return the part of a series between two steps, both included."""
    pairs = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if first <= step <= last]
    return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))


def compare_series(name: str, before: Series, after: Series, ends: Sequence[Sequence[Series]], tolerance: float) -> Row:
    """Return the row of a metric: means of its steps, or of a validation the newest values.

    Args:
        name: Of the metric.
        before: Its values in the first run, at least one.
        after: Those in the second one.
        ends: Of a validation, low and high of the 95% intervals over prompts in both runs, which may be empty.
        tolerance: Largest relative change that counts as none.
    """
    if name.startswith("validate/"):
        values = before.values[-1], after.values[-1]
        interval = _of_validations(values, ends)
    else:
        values = float(np.mean(before.values)), float(np.mean(after.values))
        interval = interval_of_difference(before.values, after.values)
    return Row(name, *values, interval, verdict(KINDS.get(name, NEITHER), *values, interval, tolerance))


def _of_validations(values: tuple[float, float], ends: Sequence[Sequence[Series]]) -> tuple[float, float] | None:
    """Return the interval of a difference of two validations, whose prompts are taken as others."""
    if not all(map(all, ends)):
        return None
    before, after = (
        Estimate(value, low.values[-1], high.values[-1], 0) for value, (low, high) in zip(values, ends, strict=True)
    )
    found = difference_of(before, after)
    return None if found.low is None or found.high is None else (found.low, found.high)


def verdict(kind: int, before: float, after: float, interval: tuple[float, float] | None, tolerance: float) -> str:
    """Return what a difference amounts to; see :class:`Row`."""
    if interval is None:
        return ""
    change = after - before
    if abs(change) <= tolerance * abs(before) or interval[0] <= 0 <= interval[1]:
        return "same"
    return "differs" if kind == NEITHER else "better" if change * kind > 0 else "worse"


def interval_of_difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% interval of the difference of two means; ``None`` for fewer than 8 steps of either.

    Neighbouring steps are alike, so blocks of them are drawn (circular block bootstrap, Politis and Romano 1992), of
    the cube root of their number. Draws are seeded: the same files give the same answer.
    """
    if min(len(before), len(after)) < MIN_STEPS:
        return None
    rng = np.random.default_rng(0)
    means = [_resampled_means(np.array(values), rng) for values in (before, after)]
    low, high = np.quantile(means[1] - means[0], [0.025, 0.975]).tolist()
    change, half = float(np.mean(after) - np.mean(before)), (high - low) / 2
    return change - half, change + half


def _resampled_means(values: np.ndarray[Any, np.dtype[np.float64]], rng: np.random.Generator) -> Any:
    count = len(values)
    size = max(1, round(count ** (1 / 3)))
    starts = rng.integers(count, size=(RESAMPLES, -(-count // size)))
    places = (starts[:, :, None] + np.arange(size)).reshape(RESAMPLES, -1)[:, :count] % count
    return values[places].mean(axis=1)


def peak_memory(metrics: Metrics, first: int, last: int) -> float | None:
    """Return the GiB of the fullest phase; ``None`` where nothing was recorded."""
    phases = (within(metrics.series(name), first, last).values for name in metrics.starting_with("memory/"))
    return max((value for values in phases for value in values), default=None)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return what differs between two mappings, in the order of their keys."""
    names = [name for name in dict.fromkeys([*before, *after]) if name not in PLACES]
    found = [
        Difference(name, *(None if each.get(name) is None else str(each[name]) for each in (before, after)))
        for name in names
    ]
    return [each for each in found if each.before != each.after]
