"""The plan as a table, and the lines below it."""

from __future__ import annotations

from dataclasses import dataclass

from rlplug.interfaces.memory_plan import RESERVE_SHARE, MemoryDecisions
from rlplug.types import GIB
from rlplug_plan.decisions import Decisions, shortfall
from rlplug_plan.networks import network_notes
from rlplug_plan.own_engine import own_engine_notes
from rlplug_plan.plan import PHASES, Item, MemoryPlan
from rlplug_plan.recommendations import recommendations


@dataclass(frozen=True)
class PlannedMemory(MemoryDecisions):
    """Decisions as the core takes and shows them, with the plan, to be compared with what is measured."""

    plan: MemoryPlan


def told(decisions: Decisions) -> PlannedMemory:
    """Return decisions as the core takes and shows them."""
    plan = decisions.plan
    return PlannedMemory(
        sleeps=plan.facts.sleeps,
        kept=decisions.kept,
        left_out=decisions.left_out,
        shortfall=shortfall(plan),
        title=memory_title(plan),
        rows=memory_rows(plan),
        notes=memory_notes(decisions),
        plan=plan,
    )


def memory_rows(plan: MemoryPlan) -> list[tuple[str, ...]]:
    """Return item, and GiB or a note for each phase; what takes nothing in any phase is left out."""
    names = list(plan.phases["update"])
    rows = [(name, *(_cell(plan.phases[phase][name]) for phase in PHASES)) for name in names]
    rows = [row for row in rows if set(row[1:]) != {"-"}]
    needs = ("needed", *(f"{plan.need(phase) / GIB:.1f}" for phase in PHASES))
    left = ("head-room", *(f"{plan.headroom(phase) / GIB:.1f}" for phase in PHASES))
    return [*rows, needs, left]


def memory_notes(decisions: Decisions) -> list[str]:
    """Return what the plan decided and recommends, a line each."""
    plan = decisions.plan
    notes = [decisions.why] if decisions.why else []
    if plan.facts.assumes_state:
        notes.append("optimizer state: assumed to be 8 bytes a parameter, the optimizer cannot step on a CPU")
    notes += network_notes(plan)
    if plan.facts.own_engine is not None:
        notes += own_engine_notes(plan.facts.own_engine)
    elif plan.facts.engine is None:
        notes.append("the engine is not part of the plan: it runs already, or does not say what it takes")
    return notes + [f"recommended: {each.text}" for each in recommendations(plan.facts)]


def memory_title(plan: MemoryPlan) -> str:
    """Return the title of the table of :func:`memory_rows`, whose last two rows are totals."""
    gpu = plan.facts.gpu
    return (
        f"memory plan, GiB on each GPU: {gpu.capacity / GIB:.1f} of {gpu.total / GIB:.1f} can be used, with a reserve "
        f"of {RESERVE_SHARE:.0%}"
    )


def _cell(item: Item) -> str:
    if item.num_bytes < 0.05 * GIB and item.note:
        return item.note
    if item.num_bytes == 0:
        return "-"
    return f"{item.num_bytes / GIB:.1f}" if item.num_bytes >= 0.05 * GIB else "<0.1"
