"""Summary of a ``torch.profiler`` trace by phase: its time, the device's busy time, costliest kernels, idle gaps.

All functions are pure, and linear in the trace's events except for sorting. All times are in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy
import numpy.typing

from rlplug.observability.phase_timer import ENGINE, PREFIX

DEVICE_WORK: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
OPERATORS: Final = frozenset({"cpu_op"})
RANGES: Final = frozenset({"user_annotation"})
"""Categories of a trace's events: device work, operators on the CPU, and named ranges."""

COLLECTIVE: Final = re.compile(
    r"nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce", re.IGNORECASE
)
"""Names of the kernels of collectives: NCCL's, and those that engines have beside it."""

ALL: Final = "all"
BETWEEN: Final = "between phases"
NUM_COSTS: Final = 12
NUM_GAPS: Final = 12

Array: TypeAlias = numpy.typing.NDArray[Any]


class Event(NamedTuple):
    """Event of a trace with a start and an end."""

    category: str
    name: str
    start: float
    end: float
    thread: Any = 0


class Span(NamedTuple):
    """Interval of one phase, or between two phases."""

    start: float
    end: float
    phase: str


@dataclass(frozen=True)
class RangeTime:
    """Time of a phase, or of an engine call within one (such as ``rollout/generate``), summed over the steps."""

    name: str
    count: int
    seconds: float
    busy: float | None
    """Seconds in which the device worked: the union of its kernels, copies and fills. None without a device."""
    collectives: float | None = None
    """Seconds in which a collective's kernel ran or waited for other ranks; None where the trace has none."""
    exposed: float | None = None
    """Of these, seconds in which the device did nothing else."""


@dataclass(frozen=True)
class Cost:
    """Cost of a kernel, copy or fill by name; without a device, of an operator without the operators that it calls."""

    name: str
    count: int
    seconds: float
    share: float
    """Share of the device's busy time, streams counted each; without a device, of all operators' time."""


@dataclass(frozen=True)
class Gap:
    """Interval in which the device was idle; the end of a phase splits it in two."""

    seconds: float
    phase: str
    before: str | None
    after: str | None
    """Names of the last event before the gap and of the first one after it; None where the trace has none."""


@dataclass(frozen=True)
class Summary:
    """Summary of a trace; ``costs`` are by phase, and for all phases together."""

    phases: list[RangeTime]
    costs: dict[str, list[Cost]]
    gaps: list[Gap]


def read_trace(path: Path, has_device: bool) -> list[Event]:
    """Return the ranges of a Chrome trace, with the device's work or, without a device, the operators."""
    wanted = RANGES | (DEVICE_WORK if has_device else OPERATORS)

    def keep(item: dict[str, Any]) -> Any:  # all others are dropped as soon as they are read
        if item.get("ph") == "X" and item.get("cat") in wanted:
            start = item["ts"] * 1e-6
            return Event(item["cat"], item["name"], start, start + item["dur"] * 1e-6, item["tid"])
        return item.get("traceEvents")

    with path.open(encoding="utf-8", errors="replace") as file:
        return [event for event in json.load(file, object_hook=keep) if event is not None]


def summarize(events: Sequence[Event], has_device: bool) -> Summary:
    """Return the summary of the time from the first phase's start to the last one's end."""
    phases = PhaseSpans(events)
    if not has_device:
        operators = sorted(
            (event for event in events if event.category in OPERATORS),
            key=lambda event: (str(event.thread), event.start, -event.end),
        )
        own = zip(operators, own_seconds(operators), strict=True)
        costs = _costs((phases.at(event.start), event.name, seconds) for event, seconds in own)
        return Summary(_range_times(events, phases, None), costs, [])
    work = [event for event in events if event.category in DEVICE_WORK]
    device = DeviceTime(work)
    times = _range_times(events, phases, device)
    if collectives := [event for event in work if COLLECTIVE.search(event.name)]:
        others = [event for event in work if not COLLECTIVE.search(event.name)]
        communication = _range_times(events, phases, DeviceTime(collectives))
        computation = _range_times(events, phases, DeviceTime(others))
        times = [
            replace(row, collectives=one.busy, exposed=(row.busy or 0.0) - (two.busy or 0.0))
            for row, one, two in zip(times, communication, computation, strict=True)
        ]
    taken = ((phases.at(event.start), event.name, event.end - event.start) for event in work)
    costs = _costs(taken, {row.name: row.busy or 0.0 for row in times})
    gaps = heapq.nlargest(NUM_GAPS, device.gaps(phases.spans), key=lambda gap: gap.seconds)
    return Summary(times, costs, gaps)


class PhaseSpans:
    """Spans of the phases, which do not overlap, and of the times between them."""

    def __init__(self, events: Iterable[Event]) -> None:
        entered = sorted(Span(event.start, event.end, name) for event, name in _named(events) if not _is_call(name))
        between = [Span(one.end, two.start, BETWEEN) for one, two in itertools.pairwise(entered)]
        self.spans = sorted([*entered, *between])
        self._starts = numpy.array([span.start for span in self.spans])

    def at(self, moment: float) -> str | None:
        """Return the phase at a moment, or None before the first and after the last one."""
        index = int(self._starts.searchsorted(moment, side="right")) - 1
        return self.spans[index].phase if index >= 0 and moment < self.spans[index].end else None


class DeviceTime:
    """Union of the intervals in which a device worked.

    Args:
        work: Kernels, copies and fills, in any order; those of several streams overlap.
    """

    def __init__(self, work: Iterable[Event]) -> None:
        ordered = sorted(work, key=lambda event: event.start)
        starts, ends = (numpy.array([getattr(event, edge) for event in ordered]) for edge in ("start", "end"))
        latest = numpy.maximum.accumulate(ends)
        opens, closes = numpy.ones(len(ordered), bool), numpy.ones(len(ordered), bool)
        opens[1:] = closes[:-1] = starts[1:] > latest[:-1]
        longest = numpy.maximum.accumulate(numpy.where(ends >= latest, numpy.arange(len(ordered)), 0))
        self._starts: Array = starts[opens]
        self._ends: Array = latest[closes]
        self._first = [ordered[index].name for index in numpy.flatnonzero(opens)]
        self._last = [ordered[index].name for index in longest[closes]]
        self._busy: Array = numpy.append(0.0, numpy.cumsum(self._ends - self._starts))

    def busy(self, start: float, end: float) -> float:
        """Return how long the device worked between two moments."""
        return self._busy_until(end) - self._busy_until(start)

    def _busy_until(self, moment: float) -> float:
        index = int(self._starts.searchsorted(moment, side="right"))
        return float(self._busy[index] - max(0.0, self._ends[index - 1] - moment)) if index else 0.0

    def gaps(self, spans: Iterable[Span]) -> Iterator[Gap]:
        """Yield the longest gaps of each span."""
        for start, end, phase in spans:
            low, high = int(self._ends.searchsorted(start, "right")), int(self._starts.searchsorted(end))
            lengths = numpy.append(self._starts[low:high], end) - numpy.append(start, self._ends[low:high])
            for number in numpy.argsort(lengths)[-NUM_GAPS:]:
                after = low + int(number)
                before_name = self._last[after - 1] if after > 0 else None
                after_name = self._first[after] if after < len(self._first) else None
                if lengths[number] > 0:  # work across the start of the span leaves no gap there
                    yield Gap(float(lengths[number]), phase, before_name, after_name)


def own_seconds(operators: Sequence[Event]) -> list[float]:
    """Return the time of each operator without that of the operators that it calls.

    Args:
        operators: Operators sorted by thread, start and descending end.
    """
    own = [event.end - event.start for event in operators]
    callers: list[int] = []
    for index, event in enumerate(operators):
        middle = (event.start + event.end) / 2  # neighbours may overlap by the rounding of a trace's times
        while callers and not (operators[callers[-1]].thread == event.thread and middle < operators[callers[-1]].end):
            callers.pop()
        if callers:
            own[callers[-1]] -= event.end - event.start
        callers.append(index)
    return own


def _range_times(events: Iterable[Event], phases: PhaseSpans, device: DeviceTime | None) -> list[RangeTime]:
    """Return the time of each phase, followed by its engine calls, then that between phases and the total."""
    grouped: dict[str, list[tuple[float, float]]] = {}
    for start, end, phase in sorted(phases.spans, key=lambda span: (span.phase == BETWEEN, span.start)):
        grouped.setdefault(phase, []).append((start, end))
    calls: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(dict)
    for event, name in _named(events):
        if _is_call(name) and (owner := phases.at(event.start)):
            calls[owner].setdefault(f"{owner}/{name.removeprefix(ENGINE)}", []).append((event.start, event.end))
    rows = [row for phase, passes in grouped.items() for row in ((phase, passes), *calls[phase].items())]
    rows.append((ALL, [(phases.spans[0].start, phases.spans[-1].end)]))
    return [
        RangeTime(
            name,
            len(passes),
            sum(end - start for start, end in passes),
            None if device is None else sum(device.busy(start, end) for start, end in passes),
        )
        for name, passes in rows
    ]


def _costs(
    taken: Iterable[tuple[str | None, str, float]], busy: Mapping[str, float] | None = None
) -> dict[str, list[Cost]]:
    """Return the costliest names of each phase and of all phases, from the phase, name and seconds of every event."""
    seconds: dict[str, Counter[str]] = defaultdict(Counter)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for phase, name, duration in taken:
        for group in (ALL, phase) if phase else ():
            seconds[group][name] += duration  # type: ignore[assignment]
            counts[group][name] += 1
    costs: dict[str, list[Cost]] = {}
    for group, by_name in seconds.items():
        total = busy[group] if busy else sum(by_name.values())
        costliest = by_name.most_common(NUM_COSTS)
        costs[group] = [Cost(name, counts[group][name], spent, spent / (total or 1.0)) for name, spent in costliest]
    return costs


def _named(events: Iterable[Event]) -> Iterator[tuple[Event, str]]:
    """Yield rlplug's own ranges and their names without the prefix; FSDP and others make ranges too."""
    for event in events:
        if event.category in RANGES and event.name.startswith(PREFIX):
            yield event, event.name.removeprefix(PREFIX)


def _is_call(name: str) -> bool:
    return name.startswith(ENGINE)
