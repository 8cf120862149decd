"""TorchTitan's activation checkpointing: what its blocks recompute in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, TypeAlias

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from rlplug_trainer_titan.library import titan

Checkpointing: TypeAlias = Literal["none", "selective", "full"]

POLICIES: Final = {"selective": "SelectiveAC", "full": "FullAC"}
"""TorchTitan's classes."""
WRAPPER: Final = "_checkpoint_wrapped_module."
"""What wrappers add to the names of parameters; TorchTitan's adapters leave out such names without a word."""


def checkpoint_blocks(decoder: Any, mode: Checkpointing) -> None:
    """Wrap every block of TorchTitan's ``decoder`` in a module that recomputes part of it, or all of it.

    ``selective`` keeps the results of attention and of every second matrix product. Random state is not saved: no
    block draws random numbers.
    """
    if mode == "none":
        return
    policy = getattr(titan("distributed.activation_checkpoint"), POLICIES[mode])
    policy.Config(preserve_rng_state=False).build().apply(decoder)


def num_checkpointed(blocks: Iterable[nn.Module]) -> int:
    """Return how many of ``blocks`` are wrapped."""
    return sum(isinstance(block, CheckpointWrapper) for block in blocks)
