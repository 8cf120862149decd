"""Wrappers around a transformer block's forward method, nested in one order however model.optimizations lists them."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeAlias

from torch import nn

from rlplug.errors import ConfigError

Forward: TypeAlias = Callable[..., Any]
"""A block's forward method."""


class WrapOrder(IntEnum):
    """Order of the wrappers around a block's forward method, innermost first.

    Compilation wraps checkpointing, so that the compiler sees what is recomputed. Where it cannot, since it breaks the
    graph of the block, torch runs checkpointing uncompiled with all that it calls; so it is compiled within it, too.
    Offloading wraps them all, because it moves the tensors that they save.
    """

    COMPILE_INSIDE = 0
    CHECKPOINT = 1
    COMPILE = 2
    OFFLOAD = 3


def wrap_forward(block: nn.Module, order: WrapOrder, wrapper: Callable[[Forward], Forward]) -> None:
    """Wrap ``block.forward`` with ``wrapper``, inside the block's hooks and so inside those of FSDP.

    Raises:
        ConfigError: Something else has wrapped the forward method since the last call, and its wrapper would be lost.
    """
    attributes = vars(block)
    attributes.setdefault("plain_forward", block.forward)
    if "wrapped_forward" in attributes and block.forward is not attributes["wrapped_forward"]:
        raise ConfigError(
            f"another optimization wrapped the forward method of {type(block).__name__} between two of rlplug-optims, "
            "and its wrapper would be lost: in model.optimizations, list it before or after them, or let it wrap in "
            "after_shard."
        )
    wrappers: dict[WrapOrder, Callable[[Forward], Forward]] = attributes.setdefault("forward_wrappers", {})
    assert order not in wrappers, f"two optimisations wrap a block as {order.name}"
    wrappers[order] = wrapper
    forward: Forward = attributes["plain_forward"]
    for _, wrap in sorted(wrappers.items()):
        forward = wrap(forward)
    attributes["forward"] = attributes["wrapped_forward"] = forward


def num_wrapped(blocks: list[nn.Module], order: WrapOrder) -> int:
    """Return how many of ``blocks`` run the wrapper that has this order."""
    wrapped = [block for block in blocks if order in vars(block).get("forward_wrappers", {})]
    return sum("forward" in vars(block) for block in wrapped)
