"""Text of a profile's summary, and its headlines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from rlplug_watch.profile.summary import ALL, BETWEEN, Gap, RangeTime, Summary

SLOWER: Final = (
    "Profiling takes time: these steps are slower than others, so rely on shares more than on seconds. time/... in "
    "metrics.jsonl has the seconds of the other steps."
)
WIDEST_NAME: Final = 100
"""Longest printed name of a kernel, in characters; summary.json has whole names."""
LEAST_SHARE: Final = 0.01
"""Smallest share of the total time for which a phase gets a table of its own; summary.json has them all."""


def summary_text(summary: Summary, title: str) -> str:
    """Return the whole summary as text, with tables for a fixed-width font."""
    note = textwrap.fill(SLOWER, 118)
    return "\n".join([title, note, "", *_phases(summary), *_costs(summary), *_gaps(summary.gaps), ""])


def headlines(summary: Summary) -> Iterator[str]:
    """Yield a few lines: the longest phases, the costliest kernel or operator, the longest gap."""
    everything = summary.phases[-1]
    phases = sorted(_only_phases(summary.phases), key=lambda row: -row.seconds)[:3]
    yield f"{everything.seconds:.3g} s{_busy(everything)}: " + ", ".join(
        f"{row.name} {row.seconds / everything.seconds:.0%}{_busy(row)}" for row in phases
    )
    if everything.exposed:
        share = everything.exposed / everything.seconds
        yield f"collectives: {share:.0%} of the time the device did nothing else, waits for other ranks included"
    for cost in summary.costs.get(ALL, [])[:1]:
        kind = "kernel" if _has_device(summary) else "operator"
        yield f"costliest {kind}: {_cut(cost.name)}, {cost.share:.0%} of {_shared(summary)}"
    for gap in summary.gaps[:1]:
        yield f"longest idle gap of the device: {gap.seconds:.3g} s in {gap.phase}"


def _phases(summary: Summary) -> Iterator[str]:
    """Yield the table of phases, with the engine's calls indented; all but seconds are the device's."""
    rows = summary.phases
    has_device, has_collectives = _has_device(summary), summary.phases[-1].collectives is not None
    title = f"{'phase':24}{'times':>7}{'seconds':>11}" + f"{'busy':>11}{'idle':>11}{'share':>8}" * has_device
    yield title + f"{'collectives':>13}{'alone':>11}" * has_collectives
    for row in rows:
        name = f"  {row.name.partition('/')[2]}" if "/" in row.name else row.name
        line = f"{name:24}{row.count if row.name != ALL else '':>7}{row.seconds:11.4f}"
        if row.busy is not None:
            line += f"{row.busy:11.4f}{row.seconds - row.busy:11.4f}{_share(row):8.1%}"
        if row.collectives is not None and row.exposed is not None:
            line += f"{row.collectives:13.4f}{row.exposed:11.4f}"
        yield line
    if has_device and ALL not in summary.costs:
        yield "\nThe trace has no GPU work: stop any other profiler that uses the GPU, such as nsys."
    if not has_device:
        yield "\nThere is no GPU here: the tables show operators on the CPU, each without those that it calls."


def _costs(summary: Summary) -> Iterator[str]:
    kind = "kernels, copies and fills" if _has_device(summary) else "operators"
    least = LEAST_SHARE * summary.phases[-1].seconds
    long = [row.name for row in _only_phases(summary.phases) if row.seconds >= least]
    for group in (name for name in (ALL, *long) if name in summary.costs):
        where = "all phases" if group == ALL else group
        yield f"\nCostliest {kind} in {where}; shares are of {_shared(summary)} there"
        yield f"{'seconds':>11}{'share':>8}{'count':>9}  name"
        for cost in summary.costs[group]:
            yield f"{cost.seconds:11.4f}{cost.share:8.1%}{cost.count:9}  {_cut(cost.name)}"


def _gaps(gaps: Sequence[Gap]) -> Iterator[str]:
    if not gaps:
        return
    yield "\nLongest idle gaps of the device, and its work before and after each"
    yield f"{'seconds':>11}  {'phase':16}names"
    for gap in gaps:
        yield f"{gap.seconds:11.4f}  {gap.phase:16}{_cut(gap.before or '-')}"
        yield f"{'':29}{_cut(gap.after or '-')}"


def _only_phases(rows: Sequence[RangeTime]) -> list[RangeTime]:
    return [row for row in rows if "/" not in row.name and row.name not in (ALL, BETWEEN)]


def _has_device(summary: Summary) -> bool:
    return summary.phases[-1].busy is not None


def _shared(summary: Summary) -> str:
    """Return the name of the total of which shares are."""
    return "the device's busy time" if _has_device(summary) else "all operators' time"


def _share(row: RangeTime) -> float:
    return (row.busy or 0.0) / (row.seconds or 1.0)


def _busy(row: RangeTime) -> str:
    return "" if row.busy is None else f" (device busy {_share(row):.0%})"


def _cut(name: str) -> str:
    return name if len(name) <= WIDEST_NAME else name[: WIDEST_NAME - 3] + "..."
