"""Figures of single steps: what trainer and engine did when, from ``groups.jsonl``."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rlplug.errors import ConfigError
from rlplug_watch.own_files import own_lines
from rlplug_watch.report.figure import HUES, Figure

FILE: Final = "groups.jsonl"
NUM_NEWEST: Final = 5
"""Steps that are shown where none are chosen: the newest ones."""
MOST_STEPS: Final = 50
"""Most steps that are shown."""
TAIL_BYTES: Final = 1 << 18
"""Bytes from the end of the file that are read for the newest steps."""
LANES: Final = ("validation beside", "engine", "trainer")
"""Rows of the figure, from below."""
LANE_AXIS: Final = {"type": "category", "categoryorder": "array", "categoryarray": list(LANES), "showgrid": False}
ENGINE_HUES: Final[Mapping[str, str]] = {
    "generating": "sky",
    "pausing": "orange",
    "paused": "grey",
    "weight sync": "vermillion",
    "idle": "line",
}


@dataclass(frozen=True)
class StepTimeline:
    """What trainer and engine did in one step, in seconds since 1970."""

    step: int
    phases: Sequence[tuple[str, float, float]]
    """Name, beginning and end."""
    engine: Sequence[tuple[float, str]]
    """Beginning of each state."""
    requests: Sequence[tuple[float, int, int]]
    """Requests in flight since a time: of training groups, and of a validation."""


@dataclass(frozen=True)
class ChosenSteps:
    """Steps from ``first`` to ``last``; without them, the newest ones."""

    first: int | None = None
    last: int | None = None

    @classmethod
    def parse(cls, text: str) -> ChosenSteps:
        """Return the steps that ``10-14`` or ``10`` names.

        Raises:
            ConfigError: It names none, or more than ``MOST_STEPS``.
        """
        first, dash, last = text.partition("-")
        last = last if dash else first
        if not all(part.isascii() and part.isdigit() and len(part) < 16 for part in (first, last)):
            raise ConfigError(f"--steps is {text!r}: give steps such as 10-14, or one step.")
        found = cls(int(first), int(last))
        if not 0 < found.num_steps <= MOST_STEPS:
            raise ConfigError(f"--steps {text} has {max(0, found.num_steps)} steps: give 1 to {MOST_STEPS}.")
        return found

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"

    @property
    def num_steps(self) -> int:
        return 0 if self.first is None or self.last is None else self.last - self.first + 1

    def read(self, path: Path | None) -> list[StepTimeline]:
        """Return the timelines of these steps from a ``groups.jsonl``; lines that have none are left out."""
        if path is None or not path.is_file():
            return []
        with path.open("rb") as file:
            if self.first is None:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL_BYTES))
                found = [_timeline(line, lambda step: True) for line in own_lines(file)]
                return [each for each in found if each is not None][-NUM_NEWEST:]
            first, last = self.first, self.last or self.first
            found = [_timeline(line, lambda step: first <= step <= last) for line in own_lines(file)]
        return [each for each in found if each is not None]


NEWEST: Final = ChosenSteps()


def _timeline(line: bytes, is_wanted: Callable[[int], bool]) -> StepTimeline | None:
    """Return the timeline of a line, or ``None`` for a step that is not wanted and for a line that has none."""
    head, colon, _ = line[:40].partition(b",")
    try:
        if colon and not is_wanted(int(head.partition(b":")[2])):
            return None
        record = json.loads(line)
        timeline = record["timeline"]
        found = StepTimeline(
            int(record["step"]),
            [(str(name), float(began), float(ended)) for name, began, ended in timeline["phases"]],
            [(float(began), str(state)) for began, state in timeline["engine"]],
            [(float(at), int(training), int(held_out)) for at, training, held_out in timeline["requests"]],
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if found.phases and all(map(math.isfinite, (found.phases[0][1], found.phases[-1][2]))) else None


@dataclass
class TimelineFigure(Figure):
    """Figure whose x axis is time."""

    origin: int = 0
    """Step at whose beginning the time is 0."""
    marks: Sequence[tuple[float, int]] = field(default_factory=tuple)
    """Seconds at which steps begin, and their numbers."""

    @property
    def spec(self) -> dict[str, Any]:
        spec = super().spec
        own = {"title": {"text": f"seconds since step {self.origin} began", "standoff": 6}, "hoverformat": ".2f"}
        spec["layout"]["xaxis"] = {**spec["layout"]["xaxis"], **own, "range": self._range(), "unifiedhovertitle": {}}
        line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 1, "color": "var(--line)"}}
        label = {"yref": "paper", "y": 1, "yanchor": "bottom", "xanchor": "left", "showarrow": False}
        spec["layout"] |= {
            "barmode": "overlay",
            "bargap": 0.35,
            "hovermode": "closest",
            "margin": {**spec["layout"]["margin"], "t": 22},
            "shapes": [line | {"x0": at, "x1": at} for at, _ in self.marks],
            "annotations": [label | {"x": at, "text": f"{step}"} for at, step in self.marks],
        }
        return spec

    def _range(self) -> list[float]:
        return [0.0, max((at + base for trace in self.traces for at, base in _ends(trace)), default=1.0)]

    def add_bars(self, lane: str, label: str, hue: str, spans: Sequence[tuple[float, float]]) -> None:
        """Add bars from a beginning to an end each, in seconds, to a lane."""
        trace = {
            "type": "bar",
            "orientation": "h",
            "name": html.escape(label),
            "y": [lane] * len(spans),
            "x": [round(end - begin, 3) for begin, end in spans],
            "base": [round(begin, 3) for begin, _ in spans],
            "marker": {"color": f"var(--{hue})"},
            "hovertemplate": f"{lane}: {html.escape(label)}, %{{x:.2f}} s<extra></extra>",
        }
        self.add(label, hue, [trace], "area")

    def add_counts(self, label: str, hue: str, points: Sequence[tuple[float, int]]) -> None:
        """Add counts that hold from their time to the next one."""
        trace = {
            "type": "scatter",
            "mode": "lines",
            "name": label,
            "x": [round(at, 3) for at, _ in points],
            "y": [count for _, count in points],
            "line": {"shape": "hv", "width": 1.5, "color": f"var(--{hue})"},
        }
        self.add(label, hue, [trace])


def _ends(trace: Mapping[str, Any]) -> list[tuple[float, float]]:
    return list(zip(trace["x"], trace.get("base") or [0.0] * len(trace["x"]), strict=True))


def timeline_figures(timelines: Sequence[StepTimeline], phase_hues: Mapping[str, str]) -> list[Figure]:
    """Return the figures of some steps: the work of trainer and engine, and the requests in flight.

    Args:
        timelines: The steps, in their order.
        phase_hues: Hue of each phase that is known; others follow.
    """
    if not timelines:
        return []
    zero, ended = timelines[0].phases[0][1], max(step.phases[-1][2] for step in timelines) - timelines[0].phases[0][1]
    work = _figure(timelines, "Trainer and engine, step by step", LANE_AXIS)
    work.note = "Of the first rank. Upright lines are beginnings of steps, with their numbers."
    spans = [(name, began - zero, end - zero) for step in timelines for name, began, end in step.phases]
    for index, name in enumerate(dict.fromkeys(name for name, _, _ in spans)):
        of_phase = [(began, end) for other, began, end in spans if other == name]
        work.add_bars("trainer", name, phase_hues.get(name, HUES[index % len(HUES)]), of_phase)
    states = [(at - zero, state) for step in timelines for at, state in step.engine]
    for state, hue in ENGINE_HUES.items():
        if of_state := _intervals([(at, other == state) for at, other in states], ended):
            work.add_bars("engine", state, hue, of_state)
    counts = [(max(at - zero, 0.0), num, more) for step in timelines for at, num, more in step.requests]
    if not counts:
        return [work]
    counts.append((ended, *counts[-1][1:]))
    flight = _figure(timelines, "Requests in flight, step by step", {"rangemode": "tozero"})
    flight.add_counts("of training groups", "sky", [(at, training) for at, training, _ in counts])
    if validating := _intervals([(at, held_out > 0) for at, _, held_out in counts], ended):
        work.add_bars("validation beside", "held-out requests in flight", "purple", validating)
        flight.add_counts("of the validation", "purple", [(at, held_out) for at, _, held_out in counts])
    return [work, flight]


def _figure(timelines: Sequence[StepTimeline], title: str, y_axis: Mapping[str, Any]) -> TimelineFigure:
    marks = [(step.phases[0][1] - timelines[0].phases[0][1], step.step) for step in timelines]
    return TimelineFigure("Speed and memory", title, wide=True, y_axis=y_axis, origin=timelines[0].step, marks=marks)


def _intervals(changes: Sequence[tuple[float, bool]], ended: float) -> list[tuple[float, float]]:
    """Return the times in which something holds, where each change lasts until the next; adjacent times are one."""
    found: list[tuple[float, float]] = []
    for index, (began, holds) in enumerate(changes):
        end = changes[index + 1][0] if index + 1 < len(changes) else ended
        if not holds or end <= max(began, 0.0):
            continue
        if found and math.isclose(found[-1][1], began):
            found[-1] = found[-1][0], end
        else:
            found.append((max(began, 0.0), end))
    return found
