"""Values that each key of :mod:`rlplug_plan.levers` can take in a run, the mildest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from rlplug.interfaces.memory import ActivationTraits
from rlplug_plan.inputs import MemoryInputs
from rlplug_plan.resize import budget_steps, share_of

MOST_GPUS: Final = 64
"""Most GPUs that are tried, as a multiple of the run's."""
ADAMW_BYTES: Final = 8.0

Values: TypeAlias = Sequence[Any]


def halves(value: int, least: int) -> list[int]:
    """Return half of ``value``, a quarter and so on, and ``least`` in the end."""
    halves = []
    while value > least:
        value = max(value // 2, least)
        halves.append(value)
    return halves


def shares(facts: MemoryInputs, holds_all: bool) -> Values:
    """Return smaller shares, in hundredths, whose cache holds all completions of a step, or those that do not."""
    engine = facts.engine
    if engine is None or engine.least_kv_cache is None:
        return []
    sizes = (engine.kv_cache, engine.least_kv_cache, facts.wanted_kv_cache)
    now, least, enough = (share_of(facts, size) for size in sizes)
    hundredths = range(round(100 * now) - 1, round(100 * least) - 1, -1)
    return [value / 100 for value in hundredths if (value >= round(100 * enough)) is holds_all]


def smaller_passes(facts: MemoryInputs) -> Values:
    """Return smaller update passes, in tokens or completions."""
    sizes = facts.sizes
    if sizes.micro_batch_size is not None:
        return range(min(sizes.micro_batch_size, sizes.rows("update")) - 1, 0, -1)
    return budget_steps(sizes.least_budget, sizes.max_tokens["update"] - 1)


def smaller_forward_passes(facts: MemoryInputs) -> Values:
    """Return smaller forward-only passes, in tokens or completions."""
    sizes = facts.sizes
    if sizes.micro_batch_size is not None:
        return range(min(sizes.rows_per_pass("forward"), sizes.rows("forward")) - 1, 0, -1)
    return budget_steps(sizes.least_budget, sizes.max_tokens["forward"] - 1)


def smaller_critic_passes(facts: MemoryInputs) -> Values:
    """Return smaller token budgets of a critic that has one of its own."""
    own = facts.sizes.critic_tokens
    return [] if own is None or facts.critic is None else budget_steps(facts.sizes.least_budget, own - 1)


def smaller_critic_forward_passes(facts: MemoryInputs) -> Values:
    """Return smaller token budgets of a critic's forward-only passes, where its passes have sizes of their own."""
    sizes = facts.sizes
    if facts.critic is None or (sizes.critic_tokens is None and sizes.critic_tokens_forward is None):
        return []
    return budget_steps(sizes.least_budget, sizes.of_critic.max_tokens["forward"] - 1)


def sequence_sizes(facts: MemoryInputs) -> Values:
    """Return larger sequence axes that the ranks and the heads allow."""
    mesh, possible = facts.mesh, facts.possible
    if "sequence" not in possible.axes or not possible.heads:
        return []
    heads, kv_heads = possible.heads // mesh.tensor, possible.kv_heads // mesh.tensor
    sizes = [size for size in _divisors(mesh.shard * mesh.sequence) if size > mesh.sequence]
    return [size for size in sizes if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)]


def tensor_sizes(facts: MemoryInputs) -> Values:
    """Return larger tensor axes that the ranks, the heads and the MLP allow."""
    mesh, possible = facts.mesh, facts.possible
    if "tensor" not in possible.axes or not possible.heads or facts.policy.adapters is not None:
        return []
    widths = (possible.heads, possible.kv_heads, facts.policy.whole.widths.mlp)
    sizes = [size for size in _divisors(mesh.shard * mesh.tensor) if size > mesh.tensor]
    return [size for size in sizes if not any(width % size for width in widths)]


def gpu_numbers(facts: MemoryInputs) -> Values:
    """Return two times the GPUs, four times and so on, where prompts and mini-batch can be divided over them."""
    prompts, numbers, times = facts.possible.prompts_per_step, [], 2
    while times <= MOST_GPUS:
        number = times * facts.num_gpus
        fits_rows = times * facts.mesh.data_size <= max(facts.sizes.update_rows, facts.sizes.data_size)
        if prompts is None or (prompts % number == 0 and fits_rows):
            numbers.append(number)
        times *= 2
    return numbers


def engine_gpu_numbers(facts: MemoryInputs) -> Values:
    """Return larger numbers of GPUs that share an engine."""
    engine, possible = facts.engine, facts.possible
    if engine is None or engine.least_kv_cache is None or not possible.larger_engines:
        return []
    sizes = [size for size in _divisors(facts.num_gpus) if size > facts.engine_gpus and size % facts.engine_gpus == 0]
    return [size for size in sizes if possible.kv_heads % size == 0 and possible.heads % size == 0]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def if_added(facts: MemoryInputs, name: str, saves_more: bool) -> Values:
    """Return an optimization that can be added, where it saves more than those that the run has."""
    return [name] if name in facts.possible.optimizations and saves_more else []


def recomputes_all(facts: MemoryInputs) -> bool:
    """Return whether every block of policy and critic is recomputed already."""
    return all(traits.recompute == "all" and traits.recompute_every == 1 for traits in traits_of_trained(facts))


def traits_of_trained(facts: MemoryInputs) -> list[ActivationTraits]:
    """Return the traits of policy and critic, which an optimization for one of them alone makes unlike."""
    return [network.traits for network in (facts.policy, facts.critic) if network is not None]


def has_adamw(facts: MemoryInputs) -> bool:
    """Return whether the optimizer is AdamW, or takes as much, for which one of 8 bits can stand."""
    return facts.possible.adamw_8bit and facts.policy.adapters is None and facts.policy.state_bytes == ADAMW_BYTES
