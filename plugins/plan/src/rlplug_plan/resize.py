"""A run with other sizes: the mesh, the engine's share and GPUs, and the tokens of a pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rlplug.training.batch_plan import PassKind, default_budget
from rlplug.types import MeshSizes
from rlplug_plan.inputs import MemoryInputs

ENGINE_OPTIONS: Final = "model.rollout.init_args"
BUDGET_STEP: Final = 1024


def with_mesh(facts: MemoryInputs, times: int = 1, sequence: int = 0, tensor: int = 0) -> MemoryInputs:
    """Return the run on ``times`` as many GPUs, or on a mesh with other axes; 0 keeps an axis as it is.

    A token budget that is not set follows the sequence axis. Each GPU's engine then has a part of the completions, and
    an engine of several GPUs stays one.
    """
    mesh = facts.mesh
    sequence, tensor = sequence or mesh.sequence, tensor or mesh.tensor
    world_size = times * mesh.world_size
    changed = MeshSizes.from_world(world_size, mesh.replicate, sequence, tensor)
    sizes = replace(facts.sizes, sequence_size=sequence, data_size=changed.data_size)
    networks = {name: getattr(facts, name) for name in ("policy", "reference", "critic")}
    split = {name: replace(network, tensor=tensor) for name, network in networks.items() if network is not None}
    if sizes.max_tokens and not sizes.update_is_set and sequence != mesh.sequence:
        sizes = with_budget(replace(facts, sizes=sizes), default_budget(sizes.longest, sequence)).sizes
    resized = replace(facts, mesh=changed, sizes=sizes, completions=-(-facts.completions // times), **split)
    engine = resized.engine
    return engine_rows(resized, -(-engine.rows // times)) if engine is not None and engine.rows else resized


# ---- the engine ---------------------------------------------------------------------------------------------------


def share_of(facts: MemoryInputs, kv_cache: int) -> float:
    """Return the engine's share of the GPU with a KV cache of at least ``kv_cache`` bytes, in hundredths."""
    assert facts.engine is not None
    return math.ceil(100 * (facts.engine.share_base + kv_cache) / facts.gpu.total) / 100


def with_share(facts: MemoryInputs, share: float) -> MemoryInputs:
    """Return the run with another share of the GPU for the engine."""
    assert facts.engine is not None
    kv_cache = int(share * facts.gpu.total) - facts.engine.share_base
    return replace(facts, engine=replace(facts.engine, kv_cache=kv_cache))


def engine_rows(facts: MemoryInputs, rows: int) -> MemoryInputs:
    """Return the run with an engine that generates ``rows`` completions at once."""
    engine = facts.engine
    assert engine is not None
    sizes = {name: getattr(engine, name) * rows // engine.rows for name in ("kv_cache", "other")}
    return replace(facts, engine=replace(engine, rows=rows, **sizes))


def with_engine_gpus(facts: MemoryInputs, number: int) -> MemoryInputs:
    """Return the run with an engine on ``number`` GPUs: a share of as much, and as much more or less for the cache."""
    engine, before = facts.engine, facts.engine_gpus
    assert engine is not None
    assert engine.least_kv_cache is not None
    share = engine.share_base + engine.kv_cache
    least = engine.least_kv_cache * before // number
    changed = replace(
        engine,
        weights=engine.weights * before // number,
        kv_bytes_per_token=engine.kv_bytes_per_token * before // number,
        least_kv_cache=least,
    )
    changed = replace(changed, kv_cache=max(least, share - changed.share_base))
    return replace(facts, engine=changed, engine_gpus=number, completions=facts.completions * number // before)


# ---- passes -------------------------------------------------------------------------------------------------------


def with_budget(facts: MemoryInputs, budget: int) -> MemoryInputs:
    """Return the run with another ``max_tokens_per_gpu``; by default forward-only passes have twice that."""
    forward = facts.sizes.max_tokens["forward"] if facts.sizes.forward_is_set else 2 * budget
    return replace(facts, sizes=replace(facts.sizes, max_tokens={"update": budget, "forward": forward}))


def with_forward_budget(facts: MemoryInputs, budget: int) -> MemoryInputs:
    """Return the run with another ``max_tokens_per_gpu_forward``."""
    budgets: dict[PassKind, int] = {"update": facts.sizes.max_tokens["update"], "forward": budget}
    return replace(facts, sizes=replace(facts.sizes, max_tokens=budgets, forward_is_set=True))


def with_critic_budget(facts: MemoryInputs, budget: int) -> MemoryInputs:
    """Return the run with another ``model.critic.max_tokens_per_gpu``."""
    return replace(facts, sizes=replace(facts.sizes, critic_tokens=budget))


def with_critic_forward_budget(facts: MemoryInputs, budget: int) -> MemoryInputs:
    """Return the run with another ``model.critic.max_tokens_per_gpu_forward``."""
    return replace(facts, sizes=replace(facts.sizes, critic_tokens_forward=budget))


def with_rows(facts: MemoryInputs, rows: int) -> MemoryInputs:
    """Return the run with another ``micro_batch_size_per_gpu``."""
    return replace(facts, sizes=replace(facts.sizes, micro_batch_size=rows))


def with_forward_rows(facts: MemoryInputs, rows: int) -> MemoryInputs:
    """Return the run with another ``micro_batch_size_per_gpu_forward``."""
    return replace(facts, sizes=replace(facts.sizes, micro_batch_size_forward=rows))


def budget_steps(least: int, most: int) -> Sequence[int]:
    """Return the multiples of 1,024 from ``most`` down to ``least``, and ``least`` itself."""
    steps = [*range(most // BUDGET_STEP * BUDGET_STEP, least, -BUDGET_STEP)] if most > least else []
    return [*steps, least] if most >= least else []
