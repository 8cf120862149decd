"""Correct optimizations of unusual style, which the kit must not refuse."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.interfaces import Effect, Optimization
from rlplug.interfaces.memory import ActivationTraits

__all__ = [
    "AfterShardingAlone",
    "AsFrozenDataclass",
    "ForThePolicyAlone",
    "OwnBackward",
    "RecomputesBlocks",
    "SwapsClasses",
    "WatchesByHooks",
    "WithoutAnnotations",
]


class WithoutAnnotations(Optimization):
    """As people write it in a notebook; without a model it has no attribute to look at."""

    def before_shard(self, model):
        self.model = model
        for block in transformer_blocks(model):
            block.forward = self.passing(block.forward)

    def passing(self, forward):
        def passing(*args, **kwargs):
            return forward(*args, **kwargs)

        return passing

    def effects(self):
        count = sum("passing" in block.forward.__qualname__ for block in transformer_blocks(self.model))
        return [Effect(f"passed on {count} blocks")] if count else []


@dataclass(frozen=True)
class AsFrozenDataclass(Optimization):
    """Keeps what it found in a list that it was made with."""

    every: int = 1
    found: list[str] = field(default_factory=list)

    def before_shard(self, model: nn.Module) -> None:
        for block in transformer_blocks(model)[:: self.every]:
            block.forward = functools.partial(block.forward)
            self.found.append(type(block).__name__)

    def effects(self) -> list[Effect]:
        return [Effect(f"wrapped {len(self.found)} blocks")] if self.found else []


class WatchesByHooks(Optimization):
    """Forward hooks that return nothing."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.num_calls = 0

    def before_shard(self, model: nn.Module) -> None:
        self.handles = [block.register_forward_hook(self.count) for block in transformer_blocks(model)]

    def count(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.num_calls += 1

    def effects(self) -> list[Effect]:
        return [*self.described()]

    def described(self) -> Iterator[Effect]:
        if self.handles:
            yield Effect(f"watches {len(self.handles)} blocks")


class SwapsClasses(Optimization):
    """Gives blocks a class of its own, before they are sharded."""

    def __init__(self) -> None:
        self.num_swapped = 0

    def before_shard(self, model: nn.Module) -> None:
        for block in transformer_blocks(model):
            block.__class__ = type(f"Swapped{type(block).__name__}", (type(block),), {})
            self.num_swapped += 1

    def effects(self) -> list[Effect]:
        return [Effect(f"swapped {self.num_swapped} classes")] if self.num_swapped else []


class AfterShardingAlone(WithoutAnnotations):
    """Wraps FSDP units."""

    def before_shard(self, model: nn.Module) -> None:
        pass

    def after_shard(self, model: nn.Module) -> None:
        super().before_shard(model)


class Passed(torch.autograd.Function):
    """The same, forward and backward, as an extension in C++ has it."""

    @staticmethod
    def forward(context: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class OwnBackward(Optimization):
    applies_to = ("policy", "reference")  # a critic has its trunk elsewhere

    def __init__(self) -> None:
        self.num_norms = 0

    def before_shard(self, model: nn.Module) -> None:
        parts: Any = model
        forward = parts.model.norm.forward
        parts.model.norm.forward = lambda hidden: Passed.apply(forward(hidden))  # type: ignore[no-untyped-call]
        self.num_norms += 1

    def effects(self) -> list[Effect]:
        return [Effect(f"{self.num_norms} norm with a backward pass of its own")] if self.num_norms else []


class ForThePolicyAlone(AfterShardingAlone):
    applies_to = ("policy",)


class RecomputesBlocks(Optimization):
    """Saves what its plan says, by torch's own function around a block's method."""

    def __init__(self) -> None:
        self.num_blocks = 0

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return replace(traits, recompute="all")

    def before_shard(self, model: nn.Module) -> None:
        for block in transformer_blocks(model):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            self.num_blocks += 1

    def effects(self) -> list[Effect]:
        return [Effect(f"{self.num_blocks} blocks are computed again")] if self.num_blocks else []
