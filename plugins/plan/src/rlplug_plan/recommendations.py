"""Recommendations of the memory plan: the engine's share of the GPU, the token budget, and what to offload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rlplug.interfaces.memory import PlanPhase
from rlplug.types import GIB
from rlplug_plan.inputs import MemoryInputs
from rlplug_plan.plan import PHASES, MemoryPlan
from rlplug_plan.remedies import ENGINE_OPTIONS, OFFLOADS, with_budget, with_share

BUDGET_STEP: Final = 1024


def recommendations(facts: MemoryInputs) -> list[str]:
    """Return lines for what can be chosen, each beside what the run has."""
    return [line for line in (_engine_share(facts), _token_budget(facts), _offload(facts)) if line is not None]


def _engine_share(facts: MemoryInputs) -> str | None:
    """Recommend a KV cache that holds all completions of an engine at once, or the largest that fits."""
    engine = facts.engine
    if engine is None or engine.least_kv_cache is None:
        return None
    wanted = max(facts.completions * facts.sizes.longest * engine.kv_bytes_per_token, engine.least_kv_cache)
    key = f"{ENGINE_OPTIONS}.{engine.share_key}"
    share = math.ceil(100 * (engine.share_base + wanted) / facts.gpu.total) / 100
    while share > 0 and not (share <= 1 and _has_room(with_share(facts, share))):
        share = round(share - 0.01, 2)
    changed = with_share(facts, share)
    cache = 0 if changed.engine is None else changed.engine.kv_cache
    if cache < engine.least_kv_cache:
        return f"{key}: no share leaves room for the trainer and one sequence"
    used, cached = wanted / cache, f"its KV cache of {cache / GIB:.1f} GiB holds"
    if used > 1:
        num_held = f"{int(facts.completions / used)} of a step's {facts.completions} completions"
        return f"{key}: {share:.2f}, the most that fits; {cached} {num_held} at once"
    awake = facts.sleeps and MemoryPlan(replace(changed, sleeps=False)).fits
    return (
        f"{key}: {share:.2f}; {cached} all {facts.completions} completions of a step, which use {used:.0%}"
        + ", and the engine need not sleep" * awake
    )


def _has_room(facts: MemoryInputs) -> bool:
    """Return whether the phases fit in which the engine's cache is there."""
    phases: Sequence[PlanPhase] = ("rollout",) if facts.sleeps else PHASES
    return all(MemoryPlan(facts).headroom(phase) >= 0 for phase in phases)


def _token_budget(facts: MemoryInputs) -> str | None:
    """Recommend the largest budget that fits, up to a mini-batch in one pass."""
    sizes = facts.sizes
    if sizes.micro_batch_size is not None:
        return None
    least = -(-sizes.longest // sizes.sequence_size)
    most = max(least, sizes.update_rows * sizes.longest // sizes.sequence_size)
    low, high = 0, -(-most // BUDGET_STEP)
    while low < high:  # the largest multiple of 1024 that fits
        middle = (low + high + 1) // 2
        if MemoryPlan(with_budget(facts, max(middle * BUDGET_STEP, least))).fits:
            low = middle
        else:
            high = middle - 1
    budget = low * BUDGET_STEP
    if budget < least:
        return None
    whole = ", a mini-batch in one pass" if budget >= most else ""
    return f"model.batch.max_tokens_per_gpu: up to {budget}{whole}"


def _offload(facts: MemoryInputs) -> str | None:
    mode = next((mode for mode in OFFLOADS if MemoryPlan(replace(facts, offload=mode)).fits), None)
    if mode is None:
        return None
    return f"model.memory.offload: {mode}" + (" is enough" if mode != facts.offload else "")
