"""Activation offloading: activations wait in pinned host memory between the forward and the backward pass."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.errors import ConfigError
from rlplug.interfaces import ActivationTraits, Effect, Network, Optimization
from rlplug_optims.block_forward import Forward, WrapOrder, num_wrapped, wrap_forward
from rlplug_optims.host_stash import HostStash
from rlplug_optims.networks import chosen_networks


class ActivationOffload(Optimization):
    """Keep what blocks save for the backward pass in pinned host memory.

    Saves: the activations of all blocks but about two, in GPU memory. With GradientCheckpointing, which leaves only the
    blocks' inputs, it moves those.
    Costs: as much host memory; and time, where a block computes for less time than its activations take to copy.
    Proof: the blocks whose forward method is wrapped.

    Copies run on a CUDA stream of their own: a block's activations are copied out while the next block runs forward,
    and copied back while the block after it runs backward.

    Rhu et al., "vDNN", arXiv:1602.08124. Parameters stay on the GPU, those that FSDP2 has gathered included.

    Args:
        min_mib: Smallest tensor to move, in MiB; smaller ones stay on the GPU.
        only_if_needed: On a GPU, leave the optimisation out where the memory plan fits without it.
        networks: Models to change; by default all.
    """

    applies_to: tuple[Network, ...] = ("policy", "critic")

    def __init__(
        self, min_mib: float = 1.0, only_if_needed: bool = False, networks: list[Network] | None = None
    ) -> None:
        if min_mib < 0:
            raise ConfigError(f"ActivationOffload.min_mib is {min_mib}: give 0 or more.")
        self.min_bytes = int(min_mib * 2**20)
        self.only_if_needed = only_if_needed
        self.applies_to = chosen_networks(self, networks)
        self._blocks: list[nn.Module] = []

    def before_shard(self, model: nn.Module) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "ActivationOffload moves activations from the GPU to the host, and this machine has no GPU: remove it "
                "from model.optimizations."
            )
        self._blocks = transformer_blocks(model)
        offload_blocks(self._blocks, self.min_bytes)

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return replace(traits, activations_on_host=True)

    def effects(self) -> list[Effect]:
        count = num_wrapped(self._blocks, WrapOrder.OFFLOAD)
        return [Effect(f"activations of {count} blocks kept in pinned host memory")] if count else []


def offload_blocks(blocks: list[nn.Module], min_bytes: int) -> HostStash:
    """Wrap ``blocks`` to keep saved tensors of at least ``min_bytes`` in host memory, and return that memory."""
    stash = HostStash(min_bytes)
    for index, block in enumerate(blocks):
        wrap = functools.partial(_offloaded, stash, block, index == len(blocks) - 1)
        wrap_forward(block, WrapOrder.OFFLOAD, wrap)
    return stash


def _offloaded(stash: HostStash, block: nn.Module, is_last: bool, forward: Forward) -> Forward:
    def offloading(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(hidden, *args, **kwargs)
        # tensors that all blocks share, such as rotary embeddings, are on the GPU anyway
        stays = [list(block.parameters()), list(block.buffers()), args, kwargs]
        with stash.block(hidden, stays, is_last):
            return forward(hidden, *args, **kwargs)

    return offloading
