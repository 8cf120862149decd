"""Compilation of transformer blocks with ``torch.compile``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.interfaces import ActivationTraits, Effect, Network, Optimization
from rlplug_optims.block_forward import Forward, WrapOrder, num_wrapped, wrap_forward
from rlplug_optims.compiler import let_lengths_vary, stop_when_not_compiled, with_a_graph
from rlplug_optims.networks import chosen_networks


class CompileBlocks(Optimization):
    """Compile the forward method of every transformer block with ``torch.compile``.

    Saves: passes over memory: norms, activations, rotary embeddings and residuals become few kernels, and fewer
    activations are kept.
    Costs: time to compile at the start: seconds, mostly.
    Proof: the blocks whose forward method is compiled; a first pass that compiles no graph stops the run.

    Blocks are compiled one by one rather than as a whole model: they are alike, so one compilation serves all, and
    FSDP2's hooks stay outside (TorchTitan, arXiv:2410.06511, section 2.2). With checkpointing, the compiled code
    includes what is recomputed; a block that breaks its graph is compiled in pieces, which run again. A block that is
    recompiled too often stops the run, rather than continue uncompiled.

    Args:
        dynamic: Compile once for any length; ``false`` compiles for each length that comes, where they are few. Only
            the batch and the length are symbols: torch's own ``dynamic=True`` makes symbols of hidden sizes and of
            constants too, and traces five times as long.
        mode: Mode of ``torch.compile``: ``max-autotune-no-cudagraphs`` searches longer for faster kernels. No mode
            uses CUDA graphs, because the parameters that FSDP2 gathers are not always at the same address.
        backend: Backend of ``torch.compile``; ``aot_eager`` compiles nothing, and shows whether a fault is the
            compiler's or the model's.
        networks: Models to change; by default all.
    """

    conflicts: ClassVar[Mapping[str, str]] = {
        "Liger": "both fuse the same operations, and torch.compile cannot see into Liger's kernels; together they are "
        "slower than either"
    }

    def __init__(
        self,
        dynamic: bool = True,
        mode: Literal["default", "max-autotune-no-cudagraphs"] = "default",
        backend: str = "inductor",
        networks: list[Network] | None = None,
    ) -> None:
        self.dynamic = dynamic
        self.mode = mode
        self.backend = backend
        self.applies_to = chosen_networks(self, networks)
        self._blocks: list[nn.Module] = []

    def before_shard(self, model: nn.Module) -> None:
        stop_when_not_compiled()
        self._blocks = transformer_blocks(model)
        for block in self._blocks:
            wrap_forward(block, WrapOrder.COMPILE_INSIDE, self._compiled)
            wrap_forward(block, WrapOrder.COMPILE, partial(self._compiled_whole, type(block)))

    def _compiled_whole(self, block: type[nn.Module], forward: Forward) -> Forward:
        compiled = with_a_graph(self._compiled(forward), block)
        return let_lengths_vary(compiled) if self.dynamic else compiled

    def _compiled(self, forward: Forward) -> Forward:
        dynamic = None if self.dynamic else False
        compiled: Forward = torch.compile(forward, dynamic=dynamic, mode=self.mode, backend=self.backend)
        return compiled

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return replace(traits, fused_pointwise=True)

    def effects(self) -> list[Effect]:
        count = num_wrapped(self._blocks, WrapOrder.COMPILE)
        return [Effect(f"torch.compile on {count} blocks ({self.backend})")] if count else []
