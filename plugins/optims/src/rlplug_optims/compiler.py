"""Settings of torch.compile that every compiled part of this distribution needs."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from rlplug.errors import RunError
from rlplug_optims.block_forward import Forward

LONGEST: Final = r"L\[.*max_length_[qk]\b"
"""Names under which the compiler knows the length of a micro-batch's longest sequence, which every block gets."""

_COMPILED: Final = set[type[nn.Module]]()
"""Classes of blocks of which this process has compiled a graph."""


def stop_when_not_compiled() -> None:
    """Make code that is recompiled too often raise an error; by default torch would run it uncompiled from then on."""
    torch._dynamo.config.recompile_limit = 32  # enough for policy, reference and critic, with and without gradients
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def let_lengths_vary(compiled: Forward) -> Forward:
    """Return a block's ``compiled`` forward method, of which one compilation serves every batch and length.

    What else varies is compiled anew, and so is a packed row of a single sequence, because the compiler makes no symbol
    of 1. The input of the first block needs a gradient as that of all others does: with frozen embeddings it would not,
    and the block would be compiled twice, forward and backward.
    """
    known = torch.compiler.config.dynamic_sources
    if LONGEST not in known:
        torch.compiler.config.dynamic_sources = f"{known},{LONGEST}".lstrip(",")

    def forward(hidden_states: torch.Tensor, *values: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and not hidden_states.requires_grad:
            hidden_states.requires_grad_()
        for value in tree_leaves((hidden_states, values, named)):
            if isinstance(value, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(value, dynamic_dims(value))
        return compiled(hidden_states, *values, **named)

    return forward


def with_a_graph(compiled: Forward, block: type[nn.Module]) -> Forward:
    """Return the ``compiled`` forward method of blocks of a class, which proves itself in its first call.

    Where a block cannot be traced, torch runs it uncompiled, and says nothing.

    Raises:
        RunError: That call compiled no graph, and none before it did.
    """

    def forward(*values: Any, **named: Any) -> Any:
        if block in _COMPILED:
            return compiled(*values, **named)
        before = counters["stats"]["unique_graphs"]
        result = compiled(*values, **named)
        if counters["stats"]["unique_graphs"] == before:
            raise RunError(
                f"CompileBlocks compiled no part of {block.__name__}: torch runs it uncompiled, as with "
                "TORCH_COMPILE_DISABLE=1, or where the block breaks its graph. TORCH_LOGS=graph_breaks says where; "
                "leave CompileBlocks out of model.optimizations to train without it."
            )
        _COMPILED.add(block)
        return result

    return forward


def dynamic_dims(value: torch.Tensor) -> list[int]:
    """Return the dimensions of a block's input that are a batch or a length: all of a mask [B, 1, T, T], else two."""
    return list(range(value.dim() if value.dim() == 4 else min(value.dim(), 2)))
