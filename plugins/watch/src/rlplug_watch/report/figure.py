"""Figure of the report, as plotly's JSON. Plotly draws it in the browser; this module does not import it.

Colours are names of CSS variables (``var(--blue)``): report.css defines them for the light and the dark theme, and
report.js resolves them, so that a chart follows the reader's theme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, Literal, TypeAlias

from rlplug_watch.report.series import MIN_SMOOTHED, Series, bucket_means, keep_extremes, smooth

Section: TypeAlias = Literal["Learning", "Stability", "Speed and memory"]
Mark: TypeAlias = Literal["line", "dot", "area", "band"]

HUES: Final = ("blue", "orange", "green", "purple", "sky", "vermillion", "yellow", "grey", "brown", "slate", "olive")
"""Colours of the Okabe-Ito palette, which colour-blind readers can tell apart, and three more."""
FEW_STEPS: Final = 10
"""Steps of a run at which each has a mark of its own."""
FEW_POINTS: Final = 40
"""Largest number of points of a line that also gets markers: a single step would be invisible otherwise."""
MANY_MARKS: Final = 60
"""Largest number of large markers on a line: more would cover each other."""
MANY_DECADES: Final = 30
"""Ratio of highest value to median above which a positive line gets a logarithmic axis."""


NO_VALUES: Final = Series()


@dataclass(frozen=True)
class LegendEntry:
    """Entry of a legend, and the traces that it shows or hides."""

    label: str
    hue: str
    traces: tuple[int, ...]
    mark: Mark


@dataclass
class Figure:
    """Chart to which lines, bands and points can be added."""

    section: Section
    title: str
    unit: str = ""
    note: str = ""
    wide: bool = False
    y_axis: Mapping[str, Any] = field(default_factory=dict)
    """Properties of plotly's ``layout.yaxis``."""
    legend: list[LegendEntry] = field(default_factory=list)
    traces: list[dict[str, Any]] = field(default_factory=list)

    @property
    def spec(self) -> dict[str, Any]:
        """Arguments of ``Plotly.newPlot``."""
        return {"data": self.traces, "layout": layout(_x_range(self.traces), self.y_axis)}

    @property
    def constant(self) -> str:
        """What never changed over several steps, such as ``Completion length: 4 tokens``; empty where a line moves.

        For lines of numbers.
        """
        if any(len(trace["x"]) < 3 or len(set(trace["y"])) > 1 or None in trace["y"] for trace in self.traces):
            return ""
        values = {entry.label: self.traces[entry.traces[0]]["y"][0] for entry in self.legend}
        shown = [f"{value:g}" if len(values) == 1 else f"{label} {value:g}" for label, value in values.items()]
        return f"{self.title}: {', '.join(shown)}" + (f" ({self.unit})" if self.unit else "")

    def add(self, label: str, hue: str, traces: Iterable[dict[str, Any]], mark: Mark = "line") -> None:
        """Add ``traces`` under one entry of the legend."""
        first = len(self.traces)
        self.traces += traces
        self.legend.append(LegendEntry(label, hue, tuple(range(first, len(self.traces))), mark))

    def add_line(self, label: str, hue: str, series: Series, *, smoothed: bool = True) -> None:
        """Add one line; a long one gets faint raw values and a bold mean."""
        if smoothed and len(series) >= MIN_SMOOTHED:
            raw = _line(label, hue, keep_extremes(series), width=1) | {"opacity": 0.4}
            mean = _line(f"{label}, smoothed", hue, smooth(series), width=2.25) | {"mode": "lines"}
            self.add(label, hue, [raw, mean])
        else:
            self.add(label, hue, [_line(label, hue, keep_extremes(series), width=2)])

    def add_band(
        self, label: str, hue: str, middle: Series, spread: Series, least: Series = NO_VALUES, most: Series = NO_VALUES
    ) -> None:
        """Add the area of ``middle`` ± ``spread``, cut at a step's lowest and highest value where these are known.

        It covers the steps that have both ``middle`` and ``spread``; below two such steps there is none.
        """
        spread_at, least_at, most_at = (dict(_points(series)) for series in (spread, least, most))
        steps = tuple(step for step in middle.steps if step in spread_at)
        if len(steps) < 2:
            return
        at = dict(_points(middle))
        below = tuple(max(at[step] - spread_at[step], least_at.get(step, -math.inf)) for step in steps)
        above = tuple(min(at[step] + spread_at[step], most_at.get(step, math.inf)) for step in steps)
        self.add_area(label, hue, Series(steps, below), Series(steps, above))

    def add_area(self, label: str, hue: str, low: Series, high: Series) -> None:
        """Add the area between two lines, which have the same steps."""
        low, high = (smooth(edge) if len(edge) >= MIN_SMOOTHED else edge for edge in (low, high))
        hidden = {"mode": "lines", "hoverinfo": "skip", "line": {"width": 0, "color": f"var(--{hue})"}}
        filled = hidden | {"fill": "tonexty", "fillcolor": f"var(--{hue}-soft)"}
        self.add(label, hue, [_trace(label, low) | hidden, _trace(label, high) | filled], "band")

    def add_points(self, label: str, hue: str, series: Series, symbol: str) -> None:
        """Add rare values, such as those of a validation, as large markers that a thin line joins."""
        marker = {
            "size": 8,
            "symbol": symbol,
            "color": f"var(--{hue})",
            "line": {"width": 1, "color": "var(--surface)"},
        }
        line = {"width": 1.25, "dash": "dot", "color": f"var(--{hue})"}
        marked = {"mode": "lines+markers", "marker": marker, "line": line, "cliponaxis": False}
        if len(series) > MANY_MARKS:
            marked = {"mode": "lines", "line": {"width": 1.25, "color": f"var(--{hue})"}}
        self.add(label, hue, [_trace(label, keep_extremes(series)) | marked], "dot")

    def add_stacked(self, label: str, hue: str, series: Series) -> None:
        """Add one layer of a stacked area chart; all layers must have the same steps."""
        colour = f"var(--{hue})"
        if len(series) == 1:
            self.add(label, hue, [_trace(label, series) | {"type": "bar", "marker": {"color": colour}}], "area")
            return
        line = {"width": 0.5, "color": colour}
        layer = {"mode": "lines", "stackgroup": "all", "fillcolor": colour, "line": line}
        self.add(label, hue, [_trace(label, bucket_means(series)) | layer], "area")


def prefers_log(series: Iterable[Series]) -> bool:
    """Return whether a logarithmic axis suits ``series``: all values positive, with a peak far above the median."""
    values = [value for one in series for value in one.values]
    return bool(values) and min(values) > 0 and max(values) > MANY_DECADES * median(values)


def _points(series: Series) -> Iterable[tuple[int, float]]:
    return zip(series.steps, series.values, strict=True)


def _trace(label: str, series: Series) -> dict[str, Any]:
    # Plotly renders names as HTML, and users choose the names of reward functions.
    return {
        "type": "scatter",
        "name": html.escape(label),
        "x": list(series.steps),
        "y": [_short(value) for value in series.values],
    }


def _line(label: str, hue: str, series: Series, width: float) -> dict[str, Any]:
    colour = f"var(--{hue})"
    mode = "lines+markers" if len(series) <= FEW_POINTS else "lines"
    return _trace(label, series) | {
        "mode": mode,
        "line": {"width": width, "color": colour},
        "marker": {"size": 5, "color": colour},
    }


def _short(value: float) -> float | None:
    """Return ``value`` with five significant digits: more would be invisible and double the size of the data."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _x_range(traces: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the range of a chart's x axis: plotly's own has wider margins for markers than for lines."""
    steps = [step for trace in traces for step in trace["x"]]
    margin = 0.012 * (length := max(steps) - min(steps))
    if not margin:
        return {"nticks": 1}
    whole = {"dtick": 1} if length < FEW_STEPS else {}  # plotly would mark halves of a step
    return {"range": [min(steps) - margin, max(steps) + margin], **whole}


def layout(x_axis: Mapping[str, Any], y_axis: Mapping[str, Any]) -> dict[str, Any]:
    """Return plotly's layout of a chart over steps, with further properties of its axes."""
    font = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12, "color": "var(--ink-2)"}
    axis = {"automargin": True, "zeroline": False, "gridcolor": "var(--grid)", "linecolor": "var(--line)"}
    return {
        "autosize": True,
        "font": font,
        "paper_bgcolor": "var(--surface)",
        "plot_bgcolor": "var(--surface)",
        "margin": {"l": 44, "r": 14, "t": 8, "b": 40},
        "showlegend": False,
        "barmode": "stack",
        "bargap": 0.7,
        "hovermode": "x unified",
        "hoverlabel": {
            "namelength": -1,
            "bgcolor": "var(--surface)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--ink)"},
        },
        "xaxis": axis
        | {
            "showgrid": False,
            "showline": True,
            "title": {"text": "step", "standoff": 6},
            "hoverformat": ",d",
            "spikecolor": "var(--grey)",
            "spikethickness": 1,
            "spikedash": "solid",
            "unifiedhovertitle": {"text": "step %{x}"},
        }
        | dict(x_axis),
        "yaxis": axis | {"nticks": 6, "exponentformat": "e", "minexponent": 4, "hoverformat": ".4~g"} | dict(y_axis),
    }
