"""Gradient checkpointing: whole transformer blocks are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.errors import ConfigError
from rlplug.interfaces import ActivationTraits, Effect, Network, Optimization
from rlplug_optims.block_forward import Forward, WrapOrder, num_wrapped, wrap_forward
from rlplug_optims.networks import chosen_networks


class GradientCheckpointing(Optimization):
    """Keep only the input of a transformer block, and run the block again in the backward pass.

    Saves: nearly all activations of the blocks; what stays is ``[N, D]`` for each.
    Costs: a second forward pass of the blocks, about a third of the update's time.
    Proof: the blocks whose forward method is wrapped.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; the non-reentrant
    ``torch.utils.checkpoint``. Random state is not saved: no block draws random numbers, because rlplug disables
    dropout.

    Args:
        every_n_blocks: Recompute every n-th block: 2 keeps the activations of half of them.
        only_if_needed: On a GPU, leave the optimisation out where the memory plan fits without it.
        networks: Models to change; by default all.
    """

    applies_to: tuple[Network, ...] = ("policy", "critic")
    conflicts: ClassVar[Mapping[str, str]] = {"SelectiveCheckpointing": "both decide what the same blocks recompute"}

    def __init__(
        self, every_n_blocks: int = 1, only_if_needed: bool = False, networks: list[Network] | None = None
    ) -> None:
        if every_n_blocks < 1:
            raise ConfigError(f"GradientCheckpointing.every_n_blocks is {every_n_blocks}: give 1 for every block.")
        self.every_n_blocks = every_n_blocks
        self.only_if_needed = only_if_needed
        self.applies_to = chosen_networks(self, networks)
        self._blocks: list[nn.Module] = []

    def before_shard(self, model: nn.Module) -> None:
        self._blocks = transformer_blocks(model)
        for block in self._blocks[:: self.every_n_blocks]:
            wrap_forward(block, WrapOrder.CHECKPOINT, checkpointed)

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return replace(traits, recompute="all", recompute_every=self.every_n_blocks)

    def effects(self) -> list[Effect]:
        count = num_wrapped(self._blocks, WrapOrder.CHECKPOINT)
        return [Effect(f"gradient checkpointing of {count} of {len(self._blocks)} blocks")] if count else []


def checkpointed(forward: Forward, **options: Any) -> Forward:
    """Return ``forward`` wrapped so that the backward pass recomputes it.

    Args:
        forward: Forward method of a block; it must not draw random numbers.
        options: Further options of ``torch.utils.checkpoint.checkpoint``.
    """

    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    return recomputing
