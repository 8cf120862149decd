"""What a critic costs, and what the networks of a run share, in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rlplug.types import GIB
from rlplug_plan.plan import CRITIC, STATE, MemoryPlan

AXES: Final = ("replicate", "shard", "sequence", "tensor")


def network_notes(plan: MemoryPlan) -> list[str]:
    """Return what the critic takes beside the policy, that all have one mesh, and what sizes their passes have."""
    facts = plan.facts
    others = [name for name in ("reference", "critic") if getattr(facts, name) is not None]
    notes = []
    if facts.has_value_head:
        notes.append("critic: a value head on the policy's trunk, which takes next to nothing")
    if facts.critic is not None:
        without = MemoryPlan(replace(facts, critic=None))
        held = plan.phases["update"][CRITIC].num_bytes
        state = plan.phases["update"][STATE].num_bytes - without.phases["update"][STATE].num_bytes
        more = plan.need("update") - without.need("update")
        passes = (more - held - state) / GIB
        notes.append(
            f"critic: {more / GIB:.1f} GiB of {plan.need('update') / GIB:.1f} in an update: weights {held / GIB:.1f}, "
            f"optimizer state {state / GIB:.1f}, and {passes:.1f} more for its passes than the policy's"
        )
    if others:
        names = " and ".join([", ".join(["policy", *others[:-1]]), others[-1]])
        axes = ", ".join(f"{axis} {getattr(facts.mesh, axis)}" for axis in AXES)
        notes.append(f"one mesh ({axes}) and one size of passes for {names}")
        own = facts.sizes.of_critic.max_tokens
        if own != facts.sizes.max_tokens:
            sizes = f"{own['update']:,} tokens, and {own['forward']:,} where nothing is trained"
            notes[-1] = f"one mesh ({axes}) for {names}; the critic's passes have {sizes}"
    return notes
