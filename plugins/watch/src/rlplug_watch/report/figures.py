"""Figures of a report: each one is built if the run recorded its metrics, and is named as absent otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlplug.interfaces.plain_values import SUMMARY_NAMES
from rlplug_watch.report.charts import FROM_ZERO, LINE_CHARTS, OPTIONAL_CHARTS, SHARE, LineChart
from rlplug_watch.report.figure import HUES, Figure, Section, prefers_log
from rlplug_watch.report.run_data import Metrics
from rlplug_watch.report.series import MIN_SMOOTHED, Series

SECTIONS: Final[tuple[Section, ...]] = ("Learning", "Stability", "Speed and memory")

LOG: Final[Mapping[str, Any]] = {"type": "log", "dtick": 1, "exponentformat": "power"}

PHASE_HUES: Final[Mapping[str, str]] = {
    "prompts": "brown",
    "sync": "vermillion",
    "rollout": "sky",
    "rewards": "orange",
    "filter": "yellow",
    "logprobs": "blue",
    "advantages": "purple",
    "update": "green",
    "publish": "olive",
    "validate": "grey",
    "checkpoint": "slate",
}
"""Hue of each phase of a step, in order; phases that plugins add follow them."""

MEMORY_PHASES: Final[tuple[str, ...]] = ("rollout", "logprobs", "update")
"""Phases whose memory has a line of its own; the highest of all others is one line more."""

_STATISTICS: Final = ("/error_share", "/ties")
"""Ends of the columns of a reward's statistics that a step has without its mean, where all of its values failed."""

SYMBOLS: Final = ("circle", "diamond", "square", "triangle-up", "cross")


def build_figures(metrics: Metrics) -> tuple[list[Figure], list[str]]:
    """Return the figures for which ``metrics`` has values, and the names of the others."""
    wanted = [
        ("Reward (reward/mean)", _reward(metrics)),
        *(
            (f"{chart.title} ({', '.join(line[1] for line in chart.lines)})", _lines(metrics, chart))
            for chart in LINE_CHARTS
        ),
        ("Time of each phase (time/...)", _phase_times(metrics)),
        ("Memory of each phase (memory/...)", _phase_memory(metrics)),
    ]
    figures = [figure for _, figure in wanted if figure is not None]
    figures += _optional(metrics)
    return figures, [name for name, figure in wanted if figure is None]


def by_section(figures: Sequence[Figure]) -> list[tuple[Section, list[Figure]]]:
    """Return the sections that have figures, each with wide figures first and then an even number of narrow ones."""
    sections = []
    for section in SECTIONS:
        members = sorted((f for f in figures if f.section == section), key=lambda figure: not figure.wide)
        narrow = [figure for figure in members if not figure.wide]
        if len(narrow) % 2:
            narrow[0].wide = True
        if members:
            sections.append((section, members))
    return sections


def _quantiles(metrics: Metrics) -> list[Figure]:
    """Return a figure of each reward's values over the steps: median, and the area that has 80% of the samples."""
    figures = []
    for name in reward_functions(metrics):
        low, middle, high = (metrics.series(f"{name}/p{percent}") for percent in (10, 50, 90))
        if len(middle) > 1 and low.steps == middle.steps == high.steps:
            label = name.removeprefix("reward/")
            figure = Figure("Learning", f"Values of {label}", "unweighted, of each sample")
            figure.add_area("80% of the samples", "blue", low, high)
            figure.add_line("median", "blue", middle)
            figure.add_line("mean", "orange", metrics.series(name))
            figure.legend = [*figure.legend[1:], figure.legend[0]]  # the area is drawn first, below the lines
            figures.append(figure)
    return figures


def _optional(metrics: Metrics) -> list[Figure]:
    """Return the figures that only some runs have, and that are not named as absent in others."""
    figures = [figure for chart in OPTIONAL_CHARTS if (figure := _lines(metrics, chart)) is not None]
    functions = reward_functions(metrics)
    if len(functions) > 1:
        figure = Figure("Learning", "Reward functions", "unweighted mean of each")
        for name, hue in zip(functions, _hues(len(functions)), strict=True):
            figure.add_line(name.removeprefix("reward/"), hue, metrics.series(name))
        figures.append(figure)
    figures += _quantiles(metrics)
    rates = [name for name in _validation_columns(metrics) if "pass@" in name]
    if rates and not _is_unit_scale(metrics):
        figure = Figure("Learning", "Validation", "share of prompts solved", y_axis=SHARE)
        _add_validation(figure, metrics, rates)
        figures.append(figure)
    return figures


def _reward(metrics: Metrics) -> Figure | None:
    mean = metrics.series("reward/mean")
    validation = _validation_columns(metrics)
    if not mean and not validation:
        return None
    figure = Figure("Learning", "Reward", wide=True)
    if mean:
        figure.add_band(
            "± one standard deviation",
            "blue",
            mean,
            metrics.series("reward/std"),
            *(metrics.series(f"reward/{name}") for name in ("min", "max")),
        )
        figure.add_line("training mean", "blue", mean)
        # The band is drawn first, below the line, but the legend should start with the line.
        figure.legend.reverse()
        if len(mean) >= MIN_SMOOTHED:
            figure.note = "Faint: each step. Bold: centred mean."
    # A share of solved prompts can share the axis with rewards, unless these have another scale.
    shared = _is_unit_scale(metrics)
    _add_validation(figure, metrics, [name for name in validation if shared or "pass@" not in name])
    return figure


def reward_functions(metrics: Metrics) -> list[str]:
    """Return the columns of single reward functions, without those of their statistics, ``reward/<name>/p10``."""
    summary = {f"reward/{name}" for name in SUMMARY_NAMES}
    found = [name for name in metrics.starting_with("reward/") if name not in summary]
    return [name for name in found if name.rpartition("/")[0] not in metrics.columns and not name.endswith(_STATISTICS)]


def _validation_columns(metrics: Metrics) -> list[str]:
    names = metrics.starting_with("validate/")
    return [name for name in names if name == "validate/reward_mean" or name.startswith("validate/pass@")]


def _is_unit_scale(metrics: Metrics) -> bool:
    return max((abs(value) for value in metrics.series("reward/mean").values), default=0.0) <= 2


def _add_validation(figure: Figure, metrics: Metrics, columns: Sequence[str]) -> None:
    hues = ("vermillion", "green", "purple", "orange", "sky")
    for index, column in enumerate(columns):
        label = "validation " + column.removeprefix("validate/").replace("_", " ")
        hue, symbol = hues[index % len(hues)], SYMBOLS[index % len(SYMBOLS)]
        figure.add_points(label, hue, metrics.series(column), symbol)


def _lines(metrics: Metrics, chart: LineChart) -> Figure | None:
    lines = [(label, hue, metrics.series(column)) for label, column, hue in chart.lines]
    lines = [line for line in lines if line[2]]
    if not lines:
        return None
    is_log = chart.may_be_log and prefers_log(series for _, _, series in lines)
    figure = Figure(chart.section, chart.title, chart.unit, chart.note, y_axis=LOG if is_log else chart.axis)
    for label, hue, series in lines:
        figure.add_line(label, hue, series)
    return figure


def phase_hues(metrics: Metrics, prefix: str) -> dict[str, str]:
    """Return the hue of each phase that has a column under ``prefix``, in the order of a step."""
    found = [name.removeprefix(prefix) for name in metrics.starting_with(prefix)]
    added = [phase for phase in found if phase not in PHASE_HUES and phase != "step"]
    hues = {phase: hue for phase, hue in PHASE_HUES.items() if phase in found}
    unused = [hue for hue in HUES if hue not in hues.values()] or list(HUES)
    return hues | {phase: unused[index % len(unused)] for index, phase in enumerate(added)}


def _phase_times(metrics: Metrics) -> Figure | None:
    phases = phase_hues(metrics, "time/")
    if not phases:
        return None
    figure = Figure("Speed and memory", "Where the time goes", "seconds per step", wide=True, y_axis=FROM_ZERO)
    cells = list(zip(*(metrics.columns[f"time/{phase}"] for phase in phases), strict=True))
    timed = [index for index, row in enumerate(cells) if any(cell is not None for cell in row)]
    steps = tuple(metrics.steps[index] for index in timed)
    # Layers of a stack need a value at every step: a phase that did not run took no time.
    layers = list(zip(*([cell or 0.0 for cell in cells[index]] for index in timed), strict=True))
    for (phase, hue), layer in zip(phases.items(), layers, strict=True):
        figure.add_stacked(phase, hue, Series(steps, layer))
    whole = metrics.columns.get("time/step", (None,) * len(cells))
    rest = tuple(
        max(0.0, (whole[index] or 0.0) - sum(row)) for index, row in zip(timed, zip(*layers, strict=True), strict=True)
    )
    if sum(rest) > 0.01 * sum(map(sum, layers)):
        figure.add_stacked("outside the phases", "line", Series(steps, rest))
    return figure


def _phase_memory(metrics: Metrics) -> Figure | None:
    phases = phase_hues(metrics, "memory/")
    if not phases:
        return None
    columns = {phase: metrics.columns[f"memory/{phase}"] for phase in phases}
    lines = {phase: metrics.series(f"memory/{phase}") for phase in MEMORY_PHASES if phase in phases}
    others = [cells for phase, cells in columns.items() if phase not in lines]
    highest = [max((cell for cell in row if cell is not None), default=None) for row in zip(*others, strict=True)]
    points = [(step, value) for step, value in zip(metrics.steps, highest, strict=False) if value is not None]
    lines["highest of the other phases"] = Series(
        tuple(step for step, _ in points), tuple(value for _, value in points)
    )
    values = [value for series in lines.values() for value in series.values]
    axis = FROM_ZERO if min(values) < 0.5 * max(values) else {}  # lines that are close would be one line from zero
    figure = Figure("Speed and memory", "Peak memory of each phase", "GiB", y_axis=axis)
    for phase, series in lines.items():
        if series:
            figure.add_line(phase, PHASE_HUES.get(phase, "grey"), series, smoothed=False)
    return figure


def _hues(count: int) -> list[str]:
    return [HUES[index % len(HUES)] for index in range(count)]
