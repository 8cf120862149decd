"""Text and numbers of a report: tiles, the table of metrics, and the samples to show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean, median
from typing import Any

from rlplug.observability.outcome import ends_of
from rlplug_watch.report.run_data import Metrics
from rlplug_watch.report.series import Series


@dataclass(frozen=True)
class Tile:
    """One headline number; ``before`` is its value at the start of the run."""

    label: str
    value: str
    note: str = ""
    before: str = ""


@dataclass(frozen=True)
class MetricRow:
    """Row of the table of metrics."""

    name: str
    first: str
    last: str
    lowest: str
    highest: str
    note: str = ""


@dataclass(frozen=True)
class HookCostRow:
    """Row of the table of what plugins cost in hooks."""

    plugin: str
    hook: str
    phase: str
    calls: str
    seconds: str
    share: str


def hook_costs(recorded: Any, seconds_of_process: float | None) -> list[HookCostRow]:
    """Return the rows of ``hook_costs`` in ``run.json``; what has another form is left out.

    Args:
        recorded: The value, which may be anything.
        seconds_of_process: How long the process ran whose hooks these are; ``None`` where that is not known.
    """
    rows = []
    for cost in recorded if isinstance(recorded, list) else []:
        if not isinstance(cost, Mapping) or not isinstance(seconds := cost.get("seconds"), int | float):
            continue
        plugin, hook, phase, calls = (str(cost.get(name, "")) for name in ("plugin", "hook", "phase", "calls"))
        share = f"{seconds / seconds_of_process:.4%}" if seconds_of_process and seconds_of_process > 0 else ""
        rows.append(HookCostRow(plugin, hook, phase, calls, f"{seconds:.4f}", share))
    return rows


def build_tiles(metrics: Metrics, info: Mapping[str, Any]) -> list[Tile]:
    """Return the headline numbers that this run recorded."""
    steps = metrics.steps
    tiles = [
        _ends_tile("Mean reward", metrics.series("reward/mean"), number),
        Tile("Steps", f"{metrics.num_trained:,}", f"step {steps[0]:,} to {steps[-1]:,}" if steps else "none yet"),
        _time_tile(metrics, info),
    ]
    throughput, mismatch = metrics.series("throughput/tokens_per_s"), metrics.series("mismatch/mean")
    if throughput:
        tiles.append(Tile("Tokens per second", number(median(throughput.values)), "median of all steps"))
    if mismatch:
        tiles.append(Tile("Mean mismatch", number(fmean(mismatch.values)), "nats, engine against trainer"))
    tiles.append(_validation_tile(metrics.series("validate/pass@1")))
    return [tile for tile in tiles if tile is not None]


def _ends_tile(label: str, series: Series, text: Callable[[float], str]) -> Tile | None:
    if not series:
        return None
    before, after, count = ends_of(series.values)
    if len(series) == 1:
        return Tile(label, text(series.values[0]), "of the only step")
    note = f"first and last {count} steps" if count > 1 else "first and last step"
    return Tile(label, text(after), note, before=text(before))


def _validation_tile(series: Series) -> Tile | None:
    if not series:
        return None
    if len(series) == 1:
        return Tile("Validation pass@1", percent(series.values[0]), f"at step {series.steps[0]:,}")
    note = f"step {series.steps[0]:,} and {series.steps[-1]:,}"
    return Tile("Validation pass@1", percent(series.values[-1]), note, before=percent(series.values[0]))


def _time_tile(metrics: Metrics, info: Mapping[str, Any]) -> Tile | None:
    """Return the time of all steps, also of those before the run was resumed; without steps, that of the process."""
    step_times = metrics.series("time/step").values
    if step_times:
        return Tile("Time in steps", duration(sum(step_times)), f"{duration(median(step_times))} a step (median)")
    seconds = process_seconds(info)
    return None if seconds is None else Tile("Wall time", duration(seconds))


def process_seconds(info: Mapping[str, Any]) -> float | None:
    """Return how long the process ran that ``run.json`` is of, the last one of a resumed run; ``None`` if it runs."""
    started, finished = parse_time(info.get("started")), parse_time(info.get("finished"))
    return finished.timestamp() - started.timestamp() if started and finished else None


def metric_rows(metrics: Metrics) -> list[MetricRow]:
    """Return the first, last, lowest and highest value of each column that has values."""
    rows = []
    for name in metrics.columns:
        values = metrics.series(name).values
        bad = metrics.num_not_finite.get(name, 0)
        note = f"{bad:,} not finite" if bad else ""
        if values:
            first, last, lowest, highest = map(number, (values[0], values[-1], min(values), max(values)))
            rows.append(MetricRow(name, first, last, lowest, highest, note))
        elif bad:
            rows.append(MetricRow(name, "-", "-", "-", "-", note))
    return rows


def number(value: float) -> str:
    """Return ``value`` with the few digits that matter: ``0.713``, ``12,840``, ``1.3e-05``."""
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.2g}"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    if size < 0.1:
        return f"{value:.3g}"
    return f"{value:.3f}" if size < 10 else f"{value:.1f}"


def percent(share: float) -> str:
    """Return ``share`` as per cent: ``71.3%``."""
    return f"{100 * share:.1f}%"


def duration(seconds: float) -> str:
    """Return ``seconds`` in the two largest units that matter: ``3 h 12 min``, ``4 min 5 s``, ``0.82 s``."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def parse_time(text: Any) -> datetime | None:
    """Return an ISO time, or ``None`` for anything else."""
    try:
        return datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
