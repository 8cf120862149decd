"""Reader of a run folder. ``metrics.jsonl`` or ``run.json`` must be there; a note replaces any other file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from rlplug.errors import ConfigError
from rlplug_watch.config_values import flat_config
from rlplug_watch.metrics_file import MetricsFile, last_values
from rlplug_watch.own_files import own_path, own_text
from rlplug_watch.report.sample_log import SampleLog, read_samples
from rlplug_watch.report.series import Series
from rlplug_watch.report.timeline import FILE as TIMELINE_FILE
from rlplug_watch.report.timeline import NEWEST, ChosenSteps, StepTimeline
from rlplug_watch.run_state import with_state

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
PROFILE_FILE = "profile/summary.txt"


@dataclass(frozen=True)
class Metrics:
    """Metrics of a run, with one finite number or ``None`` per step."""

    steps: tuple[int, ...]
    columns: Mapping[str, tuple[float | None, ...]]
    num_not_finite: Mapping[str, int] = field(default_factory=dict)
    """Number of values of a metric that are NaN, infinite or no number at all; metrics without such are left out."""
    _series: dict[str, Series] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, file: MetricsFile) -> Metrics:
        """Return the metrics that a file has so far; of a step that was written twice, the later values."""
        columns = file.columns(file.names())
        if not columns:
            return cls((), {})
        steps = np.unique(columns["step"])
        cells, not_finite = {}, {}
        for name, column in columns.items():
            if name == "step":
                continue
            row = np.full(len(steps), np.nan)
            at, values = last_values(columns, name)
            row[np.searchsorted(steps, at)] = values
            cells[name] = tuple(None if value != value else value for value in row.tolist())
            if bad := int(np.isinf(column).sum()):
                not_finite[name] = bad
        return cls(tuple(int(step) for step in steps.tolist()), cells, not_finite)

    def series(self, column: str) -> Series:
        """Return the steps of ``column`` that have a value; an empty series if the column does not exist."""
        if (series := self._series.get(column)) is None:
            cells = self.columns.get(column, ())
            steps = tuple(compress(self.steps, [cell is not None for cell in cells]))
            values = tuple(cell for cell in cells if cell is not None)
            series = self._series[column] = Series(steps, values)
        return series

    @property
    def num_trained(self) -> int:
        """Number of steps that trained. The row before the first one may hold only a validation."""
        trained = [cells for name, cells in self.columns.items() if not name.startswith("validate/")]
        return sum(any(cell is not None for cell in row) for row in zip(*trained, strict=True))

    def starting_with(self, prefix: str) -> list[str]:
        """Return the columns under ``prefix`` that hold at least one value, in the order of the file."""
        return [
            name
            for name in self.columns
            if name.startswith(prefix) and any(cell is not None for cell in self.columns[name])
        ]


@dataclass(frozen=True)
class RunData:
    """Contents of a run folder that a report shows."""

    name: str
    metrics: Metrics
    samples: SampleLog
    info: Mapping[str, Any]
    """Contents of ``run.json``, with a status that is true now; empty when it is absent or broken."""
    config: str
    profile: str
    """Summary of the profiled steps; empty when none were."""
    notes: tuple[str, ...]
    """Notes on files that are missing or could not be read, one sentence each."""
    timelines: Sequence[StepTimeline] = ()
    """Of the steps that are shown one by one, where the run recorded them."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Values of the configuration as text, by keys with dots."""


def read_run(run_dir: Path, steps: ChosenSteps = NEWEST) -> RunData:
    """Read the run folder ``run_dir``.

    Args:
        run_dir: The folder.
        steps: Those whose timelines are shown.

    Raises:
        ConfigError: The folder has neither ``metrics.jsonl`` nor ``run.json``.
    """
    notes: list[str] = []
    metrics = read_metrics(run_dir, notes)
    config = own_path(run_dir, CONFIG_FILE)
    return RunData(
        name=run_name(run_dir.resolve()),
        metrics=metrics,
        samples=read_samples(own_path(run_dir, SAMPLES_FILE), metrics.steps, notes),
        info=with_state(read_info(own_path(run_dir, RUN_FILE), notes), run_dir),
        config=read_config(config, notes),
        profile=read_profile(own_path(run_dir, PROFILE_FILE)),
        notes=tuple(notes),
        timelines=steps.read(own_path(run_dir, TIMELINE_FILE)),
        options=flat_config(config),
    )


def run_name(run_dir: Path) -> str:
    """Return the name of a run: of a number, as the folders of repeated runs are, with the folder above it."""
    return f"{run_dir.parent.name} / {run_dir.name}" if run_dir.name.isdigit() else run_dir.name


def require_run(run_dir: Path) -> None:
    """Refuse a folder that is not a run's.

    Raises:
        ConfigError: It has neither metrics nor ``run.json``.
    """
    if not any(own_path(run_dir, name) for name in (METRICS_FILE, RUN_FILE)):
        state = f"has no {METRICS_FILE}" if run_dir.is_dir() else "is not a folder"
        raise ConfigError(
            f"run_dir is {str(run_dir)!r}, which {state}: give the folder of a run, the one that holds "
            f"{METRICS_FILE} (and usually {SAMPLES_FILE}, {RUN_FILE} and {CONFIG_FILE})."
        )


def read_metrics(run_dir: Path, notes: list[str]) -> Metrics:
    """Return the metrics of a run folder, and add a sentence to ``notes`` for what could not be read.

    Raises:
        ConfigError: As for :func:`read_run`.
    """
    require_run(run_dir)
    file = MetricsFile(lambda: own_path(run_dir, METRICS_FILE))
    metrics = Metrics.of(file)
    if not metrics.steps:
        notes.append(f"No {METRICS_FILE} yet: no step has ended.")
    if file.num_damaged:
        notes.append(f"{file.num_damaged} lines of {METRICS_FILE} have no step and are left out.")
    return metrics


def read_info(path: Path | None, notes: list[str]) -> Mapping[str, Any]:
    """Return the contents of ``run.json``, or nothing and a note."""
    if path is None:
        notes.append(f"No {RUN_FILE}: status, batch plan, versions and plugins are unknown.")
        return {}
    try:
        info = json.loads(own_text(path))
    except (OSError, ValueError, RecursionError) as error:
        problem = "cannot be read" if isinstance(error, OSError) else "is not JSON"
        notes.append(f"{RUN_FILE} {problem} ({error}): status, batch plan, versions and plugins are unknown.")
        return {}
    return info if isinstance(info, dict) else {}


def read_config(path: Path | None, notes: list[str]) -> str:
    """Return the text of ``config.yaml``, or nothing and a note."""
    try:
        if path is not None:
            return own_text(path)
        notes.append(f"No {CONFIG_FILE}: the resolved configuration is unknown.")
    except (OSError, ValueError) as error:
        notes.append(f"{CONFIG_FILE} cannot be read ({error}): the resolved configuration is unknown.")
    return ""


def read_profile(path: Path | None) -> str:
    """Return the summary of the profiled steps, or nothing."""
    with suppress(OSError, ValueError):
        return "" if path is None else own_text(path)
    return ""
