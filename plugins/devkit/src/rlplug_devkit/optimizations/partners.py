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
CALLED: Final = "blocks_whose_wrapper_was_called"


class WrappedBlocks(Optimization):
    """Wraps the forward method of each block, and notes on the model which wrappers a pass called."""

    def __init__(self) -> None:
        self._num_blocks = 0

    def before_shard(self, model: nn.Module) -> None:
        blocks = transformer_blocks(model)
        called = vars(model).setdefault(CALLED, {})[type(self).__name__] = [False for _ in blocks]
        for number, block in enumerate(blocks):
            block.forward = self.wrapped(block.forward, called, number)
        self._num_blocks = len(blocks)

    def wrapped(self, forward: Callable[..., Any], called: list[bool], number: int) -> Callable[..., Any]:
        def through(*args: Any, **kwargs: Any) -> Any:
            called[number] = True
            return forward(*args, **kwargs)

        return through

    def effects(self) -> list[Effect]:
        return [Effect(f"{self._num_blocks} blocks are wrapped")] if self._num_blocks else []


class RecomputedBlocks(WrappedBlocks):
    """Whole blocks are computed again in the backward pass."""

    def wrapped(self, forward: Callable[..., Any], called: list[bool], number: int) -> Callable[..., Any]:
        def recomputing(*args: Any, **kwargs: Any) -> Any:
            called[number] = True
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return recomputing


def blocks_not_called(model: nn.Module) -> dict[str, list[int]]:
    """Return the numbers of the blocks whose wrapper no pass of a model has called, by the partner's class name."""
    notes: dict[str, list[bool]] = vars(model).get(CALLED, {})
    return {name: [number for number, was in enumerate(called) if not was] for name, called in notes.items()}
