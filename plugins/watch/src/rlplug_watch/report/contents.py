"""Contents of a run's page: what the report and ``rlplug watch`` both show, from the files of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlplug.interfaces.memory import PLAN_PHASES
from rlplug_watch.advice import advise
from rlplug_watch.levers import levers
from rlplug_watch.measures import Advice
from rlplug_watch.report.figure import Figure, Section
from rlplug_watch.report.figures import PHASE_HUES, build_figures, by_section
from rlplug_watch.report.run_data import Metrics, RunData
from rlplug_watch.report.summary import (
    HookCostRow,
    MetricRow,
    Tile,
    build_tiles,
    hook_costs,
    metric_rows,
    parse_time,
    process_seconds,
)
from rlplug_watch.report.timeline import timeline_figures

HEADLINE_PACKAGES: Final = ("rlplug", "torch")
KEY_PACKAGES: Final = (
    *HEADLINE_PACKAGES,
    "python",
    "lightning",
    "transformers",
    "vllm",
    "sglang",
    "tensorrt-llm",
    "flash-attn",
    "liger-kernel",
    "triton",
    "safetensors",
)


@dataclass(frozen=True)
class Header:
    """Status of a run, why it ended, and one line of details."""

    status: str
    message: str
    details: list[str]


@dataclass(frozen=True)
class MemoryTable:
    """Memory plan of a run, beside the highest memory that each of its phases had."""

    phases: list[str]
    rows: list[list[str]]
    """An item and its GiB, or a note, in each phase."""
    totals: list[list[str]]
    """What the plan needs, what was measured, what the plan leaves."""
    notes: list[str]


@dataclass(frozen=True)
class Contents:
    """Everything of a run's page but its samples."""

    header: Header
    advice: list[Advice]
    tiles: list[Tile]
    sections: list[tuple[Section, list[Figure]]]
    absent: list[str]
    """Figures that every run should have, and this one has not."""
    constants: list[str]
    """What other figures would show: values that were the same in all steps."""
    metric_rows: list[MetricRow]
    batch_plan: list[list[str]]
    memory: MemoryTable | None
    versions: list[tuple[str, str]]
    effects: list[str]
    changes: list[str]
    """What differed when the run was resumed."""
    hook_costs: list[HookCostRow]
    plugins: list[dict[str, str]]


def build_contents(run: RunData) -> Contents:
    """Return what the page of a run shows. What has another form in ``run.json`` is left out."""
    figures, absent = build_figures(run.metrics)
    constants = [figure.constant for figure in figures]
    moving = [figure for figure, constant in zip(figures, constants, strict=True) if not constant]
    return Contents(
        header=_header(run.info),
        advice=[*levers(run.metrics, run.info, run.options), *advise(run.metrics, run.info)],
        tiles=build_tiles(run.metrics, run.info),
        sections=by_section([*moving, *timeline_figures(run.timelines, PHASE_HUES)]),
        absent=absent if run.metrics.steps else [],
        constants=list(filter(None, constants)),
        metric_rows=metric_rows(run.metrics),
        batch_plan=_rows(run.info.get("batch_plan"), 3),
        memory=_memory(run.metrics, run.info),
        versions=_versions(run.info),
        effects=[str(effect) for effect in _list(run.info.get("effects"))],
        changes=[_change(change) for change in _list(run.info.get("changes")) if isinstance(change, dict)],
        hook_costs=hook_costs(run.info.get("hook_costs"), process_seconds(run.info)),
        plugins=[_texts(plugin) for plugin in _list(run.info.get("plugins")) if isinstance(plugin, dict)],
    )


def _change(change: Mapping[str, Any]) -> str:
    """Return a difference from the checkpoint that a run was resumed from, as a line."""
    return f"{change.get('what')} ({change.get('effect')}, since {change.get('since')})"


def _header(info: Mapping[str, Any]) -> Header:
    started, finished = parse_time(info.get("started")), parse_time(info.get("finished"))
    world_size, device = info.get("world_size"), str(info.get("device") or "").removesuffix(":0")
    details = [
        f"{world_size} \N{MULTIPLICATION SIGN} {device}" if device and world_size else device,
        f"started {started:%Y-%m-%d %H:%M}" if started else "",
        f"ended {finished:%Y-%m-%d %H:%M}" if finished else "",
        *(f"{name} {version}" for name, version in _versions(info) if name in HEADLINE_PACKAGES),
    ]
    return Header(
        status=str(info.get("status") or "unknown"),
        message=str(info.get("message") or ""),
        details=[detail for detail in details if detail],
    )


def _memory(metrics: Metrics, info: Mapping[str, Any]) -> MemoryTable | None:
    rows = _rows(info.get("memory_plan"), 1 + len(PLAN_PHASES))
    if len(rows) < 2:
        return None
    *items, needed, left = rows
    peaks = [max(metrics.series(f"memory/{phase}").values, default=None) for phase in PLAN_PHASES]
    measured = ["measured peak", *("-" if peak is None else f"{peak:.1f}" for peak in peaks)]
    notes = [str(note) for note in _list(info.get("memory_notes"))]
    return MemoryTable(list(PLAN_PHASES), items, [needed, measured, left], notes)


def _versions(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return package names and versions, the most important ones first."""
    versions = info.get("versions")
    named = {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}
    first = [name for name in KEY_PACKAGES if name in named]
    own = sorted(name for name in named if name.startswith("rlplug-"))
    rest = sorted({*named} - {*first, *own}, key=str.lower)
    return [(name, named[name]) for name in (*first, *own, *rest)]


def _texts(plugin: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(plugin.get(name) or "") for name in ("name", "distribution", "version", "state", "reason")}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _rows(value: Any, width: int) -> list[list[str]]:
    """Return ``value`` as rows with ``width`` texts each."""
    rows = [[str(cell) for cell in _list(row)] for row in _list(value)]
    return [[*row, *[""] * width][:width] for row in rows if row]
