"""What each key of :mod:`rlplug_plan.levers` does to a run, beyond a change of sizes (:mod:`rlplug_plan.resize`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from rlplug_plan.engine_sizes import requests_at_once
from rlplug_plan.inputs import MemoryInputs, ModelInputs
from rlplug_plan.resize import with_budget, with_forward_budget, with_forward_rows, with_rows

CHUNK: Final = 4096
"""Default of FusedLogprobs."""
LORA_RANK: Final = 16


def _of_networks(facts: MemoryInputs, change: Callable[[ModelInputs], ModelInputs], *names: str) -> MemoryInputs:
    networks = {name: getattr(facts, name) for name in names}
    changed: dict[str, Any] = {name: change(network) for name, network in networks.items() if network is not None}
    return replace(facts, **changed)


def with_traits(facts: MemoryInputs, names: Sequence[str], **traits: Any) -> MemoryInputs:
    """Return the run with other activation traits of the networks of these names."""
    return _of_networks(facts, lambda network: replace(network, traits=replace(network.traits, **traits)), *names)


def fused(facts: MemoryInputs, _: Any) -> MemoryInputs:
    """Return the run with FusedLogprobs."""
    chunk = facts.policy.traits.logits_chunk or CHUNK
    return with_traits(facts, ("policy", "reference"), logits_chunk=chunk, keeps_logits=False)


def with_adapters(facts: MemoryInputs, _: Any) -> MemoryInputs:
    """Return the run with adapters on all linear layers of blocks; the policy without them is the reference."""
    shape = facts.policy.whole
    (query, key, mlp), hidden = shape.widths, shape.hidden
    per_block = 2 * (hidden + query) + 2 * (hidden + key) + 3 * (hidden + mlp)
    adapters = LORA_RANK * shape.num_blocks * per_block
    return replace(facts, policy=replace(facts.policy, adapters=adapters), reference=None)


def kept_completions(facts: MemoryInputs) -> str:
    """Return what a smaller cache costs."""
    return f"the cache holds {requests_at_once(facts)} of a step's {facts.completions} completions at once"


def adds(recompute: str) -> Callable[[MemoryInputs, Any], MemoryInputs]:
    """Return the change that recomputes a part of each block."""
    return lambda facts, _: with_traits(facts, ("policy", "critic"), recompute=recompute, recompute_every=1)


def in_place_of(facts: MemoryInputs) -> str:
    """Return what GradientCheckpointing replaces, for a message."""
    is_selective = facts.policy.traits.recompute in ("all_but_products", "all_but_attention")
    return ", in place of SelectiveCheckpointing" * is_selective


def with_passes(facts: MemoryInputs, size: int) -> MemoryInputs:
    """Return the run with update passes of another size, in tokens or completions."""
    return with_budget(facts, size) if facts.sizes.micro_batch_size is None else with_rows(facts, size)


def with_forward_passes(facts: MemoryInputs, size: int) -> MemoryInputs:
    """Return the run with forward-only passes of another size, in tokens or completions."""
    return with_forward_budget(facts, size) if facts.sizes.micro_batch_size is None else with_forward_rows(facts, size)


def passes_key(facts: MemoryInputs) -> str:
    """Return the key of the size of passes: of their tokens, or of their completions."""
    size = "max_tokens_per_gpu" if facts.sizes.micro_batch_size is None else "micro_batch_size_per_gpu"
    return f"model.batch.{size}"
