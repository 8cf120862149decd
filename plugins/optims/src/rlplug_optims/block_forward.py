"""Wrappers around the forward method of a transformer block, nested in one order whatever the order of the list."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeAlias

from torch import nn

from rlplug.errors import ConfigError

Forward: TypeAlias = Callable[..., Any]
"""A block's forward method."""


class Place(IntEnum):
    """Where a wrapper stands, from the inside out.

    Compiling goes around checkpointing, so that the compiler sees what is recomputed. Offloading goes around both: it
    handles what they save.
    """

    CHECKPOINT = 0
    COMPILE = 1
    OFFLOAD = 2


def wrap_forward(block: nn.Module, place: Place, wrapper: Callable[[Forward], Forward]) -> None:
    """Put ``wrapper`` around ``block.forward``, inside the block's hooks, and so inside those of FSDP.

    Raises:
        ConfigError: Something else has wrapped what this function had set, and would be lost.
    """
    attributes = vars(block)
    attributes.setdefault("plain_forward", block.forward)
    if "wrapped_forward" in attributes and block.forward is not attributes["wrapped_forward"]:
        raise ConfigError(
            f"an optimization in between those of rlplug-optims wraps the forward method of {type(block).__name__}: in "
            "model.optimizations, list it before or after them, or let it wrap in after_shard."
        )
    wrappers: dict[Place, Callable[[Forward], Forward]] = attributes.setdefault("forward_wrappers", {})
    assert place not in wrappers, f"two optimisations wrap a block as {place.name}"
    wrappers[place] = wrapper
    forward: Forward = attributes["plain_forward"]
    for _, wrap in sorted(wrappers.items()):
        forward = wrap(forward)
    attributes["forward"] = attributes["wrapped_forward"] = forward


def num_wrapped(blocks: list[nn.Module], place: Place) -> int:
    """Return how many of ``blocks`` run a wrapper of that place."""
    wrapped = [block for block in blocks if place in vars(block).get("forward_wrappers", {})]
    return sum("forward" in vars(block) for block in wrapped)
