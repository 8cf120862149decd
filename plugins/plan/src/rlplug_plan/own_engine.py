"""The plan of an engine that has GPUs of its own: its weights, its cache, and how few GPUs one copy needs.

Such GPUs hold nothing else, so an engine may have most of each. They are taken to be as large as the trainer's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from rlplug.interfaces.memory_plan import CUDA_BYTES
from rlplug.types import GIB
from rlplug_plan.engine_sizes import engine_sizes, requests_at_once
from rlplug_plan.inputs import NCCL_BYTES, MemoryInputs
from rlplug_plan.levers import cost_of
from rlplug_plan.recommendation import Recommendation
from rlplug_plan.resize import ENGINE_OPTIONS, share_of, with_engine_gpus, with_share

MOST_SHARE: Final = 0.9
"""Share of a GPU of its own that is recommended at most, as vLLM takes by default: CUDA and libraries take some too."""
FEWER: Final = 1.1
"""How many times the completions a copy on more GPUs must hold for these not to be needless."""
SIZE_KEY: Final = f"{ENGINE_OPTIONS}.tensor_parallel_size"


def fits(side: MemoryInputs) -> bool:
    """Return whether weights, passes, and a cache of one sequence at least fit on each of an engine's GPUs.

    Args:
        side: The run as seen from the engine's GPUs: ``gpu``, ``engine``, ``engine_gpus``, ``completions`` of one copy.
    """
    engine = side.engine
    assert engine is not None
    beside = CUDA_BYTES + (NCCL_BYTES if side.engine_gpus > 1 else 0)
    return engine.awake + beside <= side.gpu.total and engine.kv_cache >= (engine.least_kv_cache or 0)


def best_side(side: MemoryInputs) -> MemoryInputs | None:
    """Return it with the fewest GPUs a copy whose caches hold about as many completions as with those that it has.

    Its share is as large as it must be, or can be. Where it does not fit, it has the fewest GPUs with which it does;
    ``None`` where there are none.
    """
    sizes = [size for size in range(1, side.num_gpus + 1) if _can_share(side, size)]
    found = [each for size in sizes if (each := _filled(side, size)) is not None]
    held = {each.engine_gpus: requests_at_once(each) / max(1, each.completions) for each in found}
    enough = held.get(side.engine_gpus, math.inf) / FEWER
    fewer = [each for each in found if each.engine_gpus <= side.engine_gpus and held[each.engine_gpus] >= enough]
    return next(iter([*fewer, *(each for each in found if each.engine_gpus > side.engine_gpus)]), None)


def _can_share(side: MemoryInputs, size: int) -> bool:
    if size == side.engine_gpus:
        return True
    heads, kv_heads = side.possible.heads, side.possible.kv_heads
    divides = side.num_gpus % size == 0 and heads > 0 and heads % size == 0 and kv_heads % size == 0
    is_option = side.engine is not None and side.engine.least_kv_cache is not None
    return divides and is_option and (size % side.engine_gpus == 0 or side.engine_gpus % size == 0)


def _with_size(side: MemoryInputs, size: int) -> MemoryInputs:
    """Return it with ``size`` GPUs a copy and the same share, which may be too small for a sequence."""
    if size == side.engine_gpus:
        return side
    changed = with_engine_gpus(side, size)
    assert side.engine is not None
    assert changed.engine is not None
    kv_cache = side.engine.share_base + side.engine.kv_cache - changed.engine.share_base
    completions = -(-side.completions * size // side.engine_gpus)
    return replace(changed, engine=replace(changed.engine, kv_cache=kv_cache), completions=completions)


def _filled(side: MemoryInputs, size: int) -> MemoryInputs | None:
    """Return it with ``size`` GPUs a copy, and a share that holds all, or the most that is recommended."""
    changed = _with_size(side, size)
    engine = changed.engine
    assert engine is not None
    if engine.least_kv_cache is None or (fits(changed) and requests_at_once(changed) == changed.completions):
        return changed if fits(changed) else None
    beside = 0 if engine.share_has_passes else engine.other
    most = int(100 * (MOST_SHARE - beside / changed.gpu.total)) / 100
    enough = max(min(most, share_of(changed, changed.wanted_kv_cache)), share_of(changed, engine.least_kv_cache))
    if fits(changed) and enough <= share_of(changed, engine.kv_cache):
        return changed
    shared = with_share(changed, enough)
    return shared if fits(shared) else None


def own_engine_notes(side: MemoryInputs) -> list[str]:
    """Return what an engine takes of its own GPUs, as it is configured."""
    engine = side.engine
    assert engine is not None
    copies, held = side.num_gpus // side.engine_gpus, requests_at_once(side)
    cached = max(0, engine.kv_cache)
    sizes = (engine.weights, cached, engine.other, engine.awake - engine.kv_cache + cached)
    weights, cache, other, all_of_it = (f"{size / GIB:.1f}" for size in sizes)
    return [
        f"engine on GPUs of its own, {side.num_gpus} for {copies} of {side.engine_gpus}, each taken to have the "
        f"trainer's {side.gpu.total / GIB:.1f} GiB: weights {weights} + KV cache {cache} + other {other} = {all_of_it} "
        f"GiB of each; {held} of the {side.completions} completions that one gets in a step run at once"
    ]


def own_engine_recommendations(side: MemoryInputs) -> list[Recommendation]:
    """Return its GPUs a copy, share and sizes, where others than it has are better."""
    best = best_side(side)
    if best is None:
        return []
    assert best.engine is not None
    assert side.engine is not None
    found, size = [], best.engine_gpus
    if size < side.engine_gpus:
        cost = f"{side.engine_gpus} took {cost_of('engine GPUs', best)}"
        found.append(Recommendation(SIZE_KEY, size, f"{size} fits, with {best.num_gpus // size} engines; {cost}"))
    elif size > side.engine_gpus:
        found.append(Recommendation(SIZE_KEY, size, f"{size}, the least that fits"))
    share, now = share_of(best, best.engine.kv_cache), share_of(side, side.engine.kv_cache)
    if best.engine.least_kv_cache is not None and share != now:
        key = f"{ENGINE_OPTIONS}.{best.engine.share_key}"
        held = f"its KV cache of {best.engine.kv_cache / GIB:.1f} GiB holds {requests_at_once(best)}"
        found.append(Recommendation(key, share, f"{share:.2f}; {held} of {best.completions} completions at once"))
    return [*found, *engine_sizes(best)]


def own_engine_shortfall(side: MemoryInputs) -> str | None:
    """Return the message of an engine that cannot hold the model and one sequence, with the least that makes it fit."""
    engine = side.engine
    assert engine is not None
    if fits(side):
        return None
    changes = _smallest_change(side)
    remedy = "No number of its GPUs makes it fit: give it more or larger ones, or a shorter context."
    if changes:
        remedy = f"Smallest change that makes it fit: {' and '.join(changes)}."
    least = engine.kv_cache if engine.least_kv_cache is None else max(engine.kv_cache, engine.least_kv_cache)
    return (
        f"the engine does not fit on GPUs of its own: weights {engine.weights / GIB:.1f}, KV cache {least / GIB:.1f}, "
        f"other {engine.other / GIB:.1f} of {side.gpu.total / GIB:.1f} GiB, within {engine.share_key}. {remedy}"
    )


def _smallest_change(side: MemoryInputs) -> list[str]:
    """Return the nearest share that fits, else the fewest GPUs a copy, else both; nothing where nothing does."""
    assert side.engine is not None
    now = share_of(side, side.engine.kv_cache)
    if share := _nearest_share(side, now):
        return [share]
    larger = [size for size in range(side.engine_gpus + 1, side.num_gpus + 1) if _can_share(side, size)]
    sides = [_with_size(side, size) for size in larger]
    for each in sides:
        if fits(each):
            return [f"{SIZE_KEY}: {each.engine_gpus}"]
    both = ([f"{SIZE_KEY}: {each.engine_gpus}", share] for each in sides if (share := _nearest_share(each, now)))
    return next(both, [])


def _nearest_share(side: MemoryInputs, now: float) -> str | None:
    """Return the key and the share nearest to ``now`` with which it fits, the larger of two; ``None`` without one."""
    engine = side.engine
    assert engine is not None
    if engine.least_kv_cache is None:
        return None
    shares = sorted(range(99, 0, -1), key=lambda hundredths: abs(hundredths - round(100 * now)))
    found = next((each / 100 for each in shares if fits(with_share(side, each / 100))), None)
    return None if found is None else f"{ENGINE_OPTIONS}.{engine.share_key}: {found}"


def engine_side(facts: MemoryInputs, share: float | None = None) -> MemoryInputs:
    """Return the run as its engine's own GPUs see it, from one whose ``engine`` has them.

    Args:
        facts: The run, with the completions of a step over all ranks as ``completions``.
        share: The engine's share as it is set, where that may be too small for what ``engine`` has at least.
    """
    engine = facts.engine
    assert engine is not None
    if share is not None and engine.kv_cache == engine.least_kv_cache:
        engine = replace(engine, kv_cache=int(share * facts.gpu.total) - engine.share_base)
    own, gpu = engine.own_gpus, facts.gpu
    copies = max(1, own // facts.engine_gpus)
    return replace(
        facts,
        engine=engine,
        gpu=replace(gpu, free=gpu.total, is_here=False),
        mesh=replace(facts.mesh, replicate=1, shard=own, sequence=1, tensor=1),
        completions=-(-facts.completions // copies),
    )
