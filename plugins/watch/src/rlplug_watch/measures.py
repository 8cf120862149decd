"""What advice is made from: a piece of it, and how a metric went over a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from statistics import fmean
from typing import Any, Final

from rlplug.observability.intervals import Estimate, difference_of, mean_over
from rlplug_watch.report.run_data import Metrics
from rlplug_watch.report.series import Series

DOCS: Final = f"https://github.com/rlplug/rlplug/blob/v{version('rlplug')}/docs/"
"""Pages of the installed version."""

LEAST_STEPS: Final = 20
"""Fewest steps of a run that is judged by how it learns: a quarter of it is then five steps. In a shorter one, most
completions of a policy may still be cut, and most groups be equal."""


@dataclass(frozen=True)
class Advice:
    """One piece of advice."""

    text: str
    """What was measured, and what to do."""
    key: str
    """The option to change, as in a configuration: ``model.sampling.max_new_tokens``."""
    page: str
    """Page of ``docs/`` that explains it, with the section: ``algorithms.md#dynamic-sampling``."""
    value: str = ""
    """What to set the option to, where there is one value to try first."""

    @property
    def setting(self) -> str:
        """The option, with its value where there is one: ``data.train.init_args.streaming: false``."""
        return f"{self.key}: {self.value}" if self.value else self.key

    @property
    def url(self) -> str:
        """Address of the page."""
        return DOCS + self.page


def is_on_gpu(info: Mapping[str, Any]) -> bool:
    """Return whether a run of that ``run.json`` trains on GPUs."""
    return str(info.get("device", "")).startswith("cuda")


def quarters_of(series: Series) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the values of the first and of the last quarter; ``None`` for a run that is too short to judge."""
    if len(series) < LEAST_STEPS:
        return None
    count = len(series) // 4
    return series.values[:count], series.values[-count:]


def late_mean(metrics: Metrics, name: str) -> float | None:
    """Return the mean of the last quarter of a metric, of one step at least."""
    values = metrics.series(name).values
    return fmean(values[-max(1, len(values) // 4) :]) if values else None


def direction_of(before: tuple[float, ...], after: tuple[float, ...]) -> int:
    """Return 1 where the mean of steps rose, -1 where it fell, 0 where the 95% interval of the change has 0 in it.

    Steps are taken as independent; values that are all alike vary by nothing.
    """
    return difference_of(_mean_of(before), _mean_of(after)).direction


def _mean_of(values: tuple[float, ...]) -> Estimate:
    if len(set(values)) == 1:
        return Estimate(values[0], values[0], values[0], len(values))
    found = mean_over(values)
    assert found is not None
    return found
