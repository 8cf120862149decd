"""The kit's own partners of an optimization: one is named before it, the other after it, and both wrap blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.interfaces.optimization import Effect, Optimization

WITH_PARTNER: Final = " with recomputed blocks"
"""What the name of a variant has behind it where partners are applied, too."""
CALLED: Final = "was_called_by_{}"
"""Attribute of a block: whether a pass has called a partner's wrapper, whose class it names."""


class WrappedBlocks(Optimization):
    """Wraps the forward method of each block, and notes on the block that a pass called the wrapper."""

    def __init__(self) -> None:
        self._num_blocks = 0

    def before_shard(self, model: nn.Module) -> None:
        blocks = transformer_blocks(model)
        for block in blocks:
            setattr(block, CALLED.format(type(self).__name__), False)
            block.forward = self.wrapped(block, block.forward)
        self._num_blocks = len(blocks)

    # a wrapper has nothing but its block: compilers then use one graph for all
    def wrapped(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def through(*args: Any, **kwargs: Any) -> Any:
            block.was_called_by_WrappedBlocks = True  # type: ignore[assignment]
            return forward(*args, **kwargs)

        return through

    def effects(self) -> list[Effect]:
        return [Effect(f"{self._num_blocks} blocks are wrapped")] if self._num_blocks else []


class RecomputedBlocks(WrappedBlocks):
    """Whole blocks are computed again in the backward pass."""

    def wrapped(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def recomputing(*args: Any, **kwargs: Any) -> Any:
            block.was_called_by_RecomputedBlocks = True  # type: ignore[assignment]
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return recomputing


def blocks_not_called(model: nn.Module) -> dict[str, list[int]]:
    """Return the numbers of the blocks whose wrapper no pass of a model has called, by the partner's class name."""
    blocks, partners = transformer_blocks(model), (WrappedBlocks.__name__, RecomputedBlocks.__name__)
    return {
        name: [number for number, block in enumerate(blocks) if not getattr(block, CALLED.format(name), True)]
        for name in partners
    }
