"""A lack of memory as numbers, and its message: planned against measured, and the smallest change that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rlplug.interfaces.memory import PlanPhase
from rlplug.interfaces.memory_plan import CUDA_BYTES
from rlplug.types import GIB
from rlplug_plan.inputs import MemoryInputs
from rlplug_plan.plan import MemoryPlan
from rlplug_plan.remedies import alternatives, find_remedies

LARGE_SHARE: Final = 0.05
"""Share of the GPU from which on reserved but unallocated memory, or that of other processes, is named as a cause."""
EXPANDABLE: Final = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
LEAST: Final = int(0.05 * GIB)
"""Least bytes of an item that the table shows."""
WIDTH: Final = 38
REST: Final = "all else, measured together"


@dataclass(frozen=True)
class Shortage:
    """What is known of a device whose memory has run out, in bytes; ``None`` for what could not be learned.

    Attributes:
        during: What the run did: ``phase update``, for one.
        phase: The plan's phase that holds the same; ``None`` where the plan has none.
        device: Name of the device.
        requested: The allocation that failed.
        free: What no process has.
        allocated: What torch had allocated, without what a sleeping engine has released.
        unallocated: What torch had reserved beside that.
        peak: Most that torch had allocated in the phase.
        items: Measured items, by their names in the plan.
        can_expand: Whether expandable segments are off, and no engine shares the GPU that could not bear them.
        plan: The plan of the run.
    """

    step: int
    rank: int
    num_ranks: int
    during: str
    phase: PlanPhase | None
    device: str
    requested: int | None
    total: int | None
    free: int | None
    allocated: int | None
    unallocated: int | None
    peak: int | None
    items: Mapping[str, int]
    can_expand: bool
    plan: MemoryPlan | None

    @property
    def outside(self) -> int | None:
        """What torch did not allocate in this process: CUDA's context, libraries, and other processes."""
        if self.total is None or self.free is None or self.allocated is None or self.unallocated is None:
            return None
        return max(0, self.total - self.free - self.allocated - self.unallocated)

    @property
    def needed(self) -> int | None:
        """Least that the phase needs as it was measured, without fragmentation and what others held at the start."""
        if self.plan is None or self.outside is None or self.allocated is None:
            return None
        gpu = self.plan.facts.gpu
        held_before = max(0, gpu.total - gpu.free - CUDA_BYTES)
        own = max(self.peak or 0, self.allocated + (self.requested or 0))
        return own + max(0, self.outside - held_before)

    @property
    def factor(self) -> float:
        """How much more the phase needs than it was planned to, at least 1: it may have needed more still."""
        if self.plan is None or self.phase is None or self.needed is None:
            return 1.0
        return max(1.0, self.needed / self.plan.need(self.phase))

    @property
    def measured_facts(self) -> MemoryInputs | None:
        """The plan's inputs with that factor; ``None`` where plan and measurement cannot be compared."""
        if self.plan is None or self.phase is None or self.needed is None:
            return None
        return replace(self.plan.facts, scales={self.phase: self.factor})


def message(shortage: Shortage) -> str:
    """Return what a person needs to know of a lack of memory: at most a screen of lines."""
    step = f" of step {shortage.step}" if shortage.during.startswith("phase") else ""
    head = f"{shortage.during}{step}, rank {shortage.rank} of {shortage.num_ranks}, {shortage.device}; in GiB:"
    return "\n".join([head, *_device_rows(shortage), *_plan_rows(shortage), *_changes(shortage)])


def _device_rows(shortage: Shortage) -> Iterator[str]:
    rows = {
        "total": shortage.total,
        "allocated by torch": shortage.allocated,
        "  at its peak in this phase": shortage.peak,
        "reserved by torch, not allocated": shortage.unallocated,
        "CUDA, libraries and other processes": shortage.outside,
        "free": shortage.free,
        "asked for": shortage.requested,
    }
    yield from (f"  {name:{WIDTH}}{size / GIB:8.2f}" for name, size in rows.items() if size is not None)


def _plan_rows(shortage: Shortage) -> Iterator[str]:
    """Yield the plan's items beside those that were measured; what cannot be told apart is measured together."""
    plan, phase, measured = shortage.plan, shortage.phase, shortage.items
    if plan is None or phase is None or shortage.needed is None:
        return
    yield f"  {f'{phase}, by item':{WIDTH}}{'planned':>8}{'measured':>10}"
    for name, item in plan.phases[phase].items():
        if max(item.num_bytes, measured.get(name, 0)) >= LEAST:
            found = f"{measured[name] / GIB:10.2f}" if name in measured else ""
            yield f"  {name:{WIDTH}}{item.num_bytes / GIB:8.2f}{found}"
    known = {name: item.num_bytes for name, item in plan.phases[phase].items() if name in measured}
    planned_rest, rest = plan.need(phase) - sum(known.values()), shortage.needed - sum(measured[name] for name in known)
    yield f"  {REST:{WIDTH}}{planned_rest / GIB:8.2f}{rest / GIB:10.2f}"
    yield f"  {'needed':{WIDTH}}{plan.need(phase) / GIB:8.2f}{shortage.needed / GIB:10.2f}"


def _changes(shortage: Shortage) -> Iterator[str]:
    """Yield what to change, the cheapest first."""
    total, unallocated, outside = shortage.total or 0, shortage.unallocated or 0, shortage.outside or 0
    is_fragmented = total > 0 and unallocated >= LARGE_SHARE * total
    if is_fragmented:
        pieces = f"{unallocated / GIB:.1f} GiB are reserved in pieces that nothing fits in"
        yield f"First set {EXPANDABLE}: {pieces}." if shortage.can_expand else f"Fragmentation: {pieces}."
    has_engine = shortage.plan is not None and shortage.plan.facts.engine is not None
    if total > 0 and outside >= LARGE_SHARE * total and not has_engine:
        yield f"nvidia-smi names who holds the {outside / GIB:.1f} GiB that torch does not."
    facts = shortage.measured_facts
    if facts is None:
        why = "nothing was planned" if shortage.plan is None else "the plan has no such phase, or nothing was measured"
        yield f"No change is computed, since {why}: docs/memory.md lists what helps."
        return
    if MemoryPlan(facts).fits:
        yield "By the plan, what was measured fits: other processes or fragmentation take what is missing."
        return
    measured = f"with the plan of this phase times {shortage.factor:.2f}, as measured"
    remedies = find_remedies(facts, may_try=False)
    if len(remedies) == 1:
        yield f"Smallest change that fits, {measured}: {'; and '.join(each.text for each in remedies[0].settings)}."
    elif remedies:
        choice = f"One of these does: {alternatives(remedies)}."
        yield f"Nothing fits that trains the same on as many GPUs, {measured}. {choice}"
    else:
        yield f"No option makes it fit, {measured}: take a smaller model, shorter sequences, or larger GPUs."
