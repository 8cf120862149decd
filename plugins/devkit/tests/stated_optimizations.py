"""Optimizations that do something else than their authors say, the right one first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from broken_optimizations import Fine
from torch import nn
from unusual_optimizations import RecomputesBlocks

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.errors import ConfigError
from rlplug.interfaces import Effect, Network
from rlplug.interfaces.memory import ActivationTraits


class Stated(Fine):
    """Wraps every n-th block."""

    def __init__(self, every: int = 1, networks: Sequence[Network] = ("policy", "critic")) -> None:
        super().__init__()
        if every < 1:
            raise ConfigError(f"every is {every}: give 1 for every block.")
        self.every = every
        self.applies_to = tuple(networks)

    def before_shard(self, model: nn.Module) -> None:
        self.blocks = transformer_blocks(model)[:: self.every]
        for index, block in enumerate(self.blocks):
            block.forward = self.wrapped(block.forward, index)


class TakesAnyNumber(Fine):
    def __init__(self, every: int = 1) -> None:
        super().__init__()


class HasAnotherDefault(Stated):
    def __init__(self, every: int = 2) -> None:
        super().__init__(every)


class AppliesToAll(Stated):
    def __init__(self, every: int = 1) -> None:
        super().__init__(every, ("policy", "reference", "critic"))


class CountsOneMore(Stated):
    def effects(self) -> list[Effect]:
        return [Effect(f"wrapped {len(self.blocks) + 1} blocks")] if self.blocks else []


class PlansFusedNorms(Stated):
    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return replace(traits, fused_norms=True)


class ConflictsWithASentence(Stated):
    conflicts = MappingProxyType({"gradient checkpointing": "both wrap blocks"})


class ChunksOnPaper(RecomputesBlocks):
    """Keeps less of the blocks, and all logits."""

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return replace(super().plan_memory(traits), logits_chunk=4)


BROKEN_OPTIONS: Final[Mapping[str, Sequence[tuple[str, Callable[[], Any]]]]] = {
    each.__name__: [("every", lambda each=each: each(every=0))] for each in (Stated, TakesAnyNumber)
}
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {name: {"every": 1} for name in ("Stated", "HasAnotherDefault")}
CLAIMS: Final[Mapping[str, Mapping[str, Any]]] = {
    name: {"applies_to": ("policy", "critic")} for name in ("Stated", "AppliesToAll")
}
EFFECTS: Final[Mapping[str, Sequence[str]]] = {name: ["wrapped 3 blocks"] for name in ("Stated", "CountsOneMore")}
PLANS: Final[Mapping[str, ActivationTraits]] = {name: ActivationTraits() for name in ("Stated", "PlansFusedNorms")}
"""What the author of the right one states, by its name and by that of a mistake."""
