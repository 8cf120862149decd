"""Selective checkpointing: the cheap operations of transformer blocks are recomputed in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

import torch
import torch.nn.attention.varlen  # registers its operator
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import rlplug_optims.shared_prefixes.tree_attention as tree_attention
from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.errors import ConfigError
from rlplug.interfaces import ActivationTraits, Effect, Network, Optimization
from rlplug_optims import flash_attention
from rlplug_optims.block_forward import Forward, WrapOrder, num_wrapped, wrap_forward
from rlplug_optims.gradient_checkpointing import checkpointed
from rlplug_optims.networks import chosen_networks

Kind: TypeAlias = Literal["matrix_products", "attention"]

aten: Final = torch.ops.aten
OPERATORS: Final[Mapping[Kind, list[Any]]] = {
    "matrix_products": [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default],
    "attention": [
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_attention_math.default,
        aten._flash_attention_forward.default,
        torch.ops.torch_attn._varlen_attn.default,
        flash_attention.OPERATOR,
        tree_attention.OPERATOR,
    ],
}
"""Operators whose results are kept, by the name that a configuration gives."""


class SelectiveCheckpointing(Optimization):
    """Keep the expensive results of a block, and recompute the cheap ones in the backward pass.

    Saves: norms, activations, rotary embeddings and residuals of the blocks.
    Costs: those passes over memory once more; with ``save: [attention]`` matrix products too.
    Proof: the blocks whose forward method is wrapped.

    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198; torch's
    ``create_selective_checkpoint_contexts``.

    Args:
        save: Results to keep: those of ``matrix_products``, of ``attention``, or both.
        only_if_needed: On a GPU, leave the optimisation out where the memory plan fits without it.
        networks: Models to change; by default all.
    """

    applies_to: tuple[Network, ...] = ("policy", "critic")
    conflicts: ClassVar[Mapping[str, str]] = {
        "GradientCheckpointing": "both decide what the same blocks recompute",
    }

    def __init__(
        self, save: list[Kind] | None = None, only_if_needed: bool = False, networks: list[Network] | None = None
    ) -> None:
        self.save: list[Kind] = ["matrix_products", "attention"] if save is None else save
        if not self.save or not set(self.save) <= set(OPERATORS):
            raise ConfigError(
                f"SelectiveCheckpointing.save is {self.save}: give one or both of {', '.join(OPERATORS)}. To keep "
                "nothing, use GradientCheckpointing."
            )
        self.only_if_needed = only_if_needed
        self.applies_to = chosen_networks(self, networks)
        self._blocks: list[nn.Module] = []

    def before_shard(self, model: nn.Module) -> None:
        self._blocks = transformer_blocks(model)
        for block in self._blocks:
            wrap_forward(block, WrapOrder.CHECKPOINT, self._checkpointed)

    def _checkpointed(self, forward: Forward) -> Forward:
        kept = [operator for kind in self.save for operator in OPERATORS[kind]]
        return checkpointed(forward, context_fn=functools.partial(create_selective_checkpoint_contexts, kept))

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return replace(traits, recompute="all_but_products" if "matrix_products" in self.save else "all_but_attention")

    def effects(self) -> list[Effect]:
        count = num_wrapped(self._blocks, WrapOrder.CHECKPOINT)
        return [Effect(f"selective checkpointing of {count} blocks keeps {', '.join(self.save)}")] if count else []
