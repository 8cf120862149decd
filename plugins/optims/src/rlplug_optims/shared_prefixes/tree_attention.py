"""Attention over a tree row on a GPU: one operator, whose kernels skip what no token sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from rlplug.models.attention.sequences import Sequences
from rlplug.models.packing import to_device
from rlplug_optims.shared_prefixes.tile_lists import Mask
from rlplug_optims.shared_prefixes.tree import TreeRow

ANY_STRIDES: Final = torch.Tag.flexible_layout
"""The kernels read tensors as they lie: without this tag, compiled blocks would copy queries and keys before them."""


@dataclass(frozen=True)
class TreeAttention:
    """Attends by one operator, so that blocks of a model are checkpointed and compiled as with plain attention."""

    ends: Tensor
    """int32 [N], of the tree row."""
    positions: Tensor
    """int32 [N]."""

    @staticmethod
    def of(row: TreeRow) -> TreeAttention:
        return TreeAttention(torch.from_numpy(row.ends), torch.from_numpy(row.positions.astype("int32")))

    def to(self, device: torch.device | str) -> TreeAttention:
        moved = [to_device(tensor, device) for tensor in (self.ends, self.positions)]
        for tensor in moved:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return TreeAttention(*moved)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        """Return attention [H, N, head_dim]; see :class:`~rlplug.models.attention.sequences.SharedAttention`."""
        scale = query.shape[-1] ** -0.5 if sequences.scale is None else sequences.scale
        how = (float(scale), sequences.window or 0, sequences.softcap or 0.0)
        output: Tensor = OPERATOR(query, key, value, sequences.sinks, self.ends, self.positions, *how)[0]
        return output


@torch.library.custom_op("rlplug_optims::tree_attention", mutates_args=(), tags=(ANY_STRIDES,))
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    ends: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return attention [H, N, head_dim] of a tree row, and float32 [H, N] logarithms of sums to the base 2.

    A window and a soft cap of 0 are none.
    """
    from rlplug_optims.shared_prefixes import launch

    widths, dtypes = {each.shape[-1] for each in (query, key, value)}, {each.dtype for each in (query, key, value)}
    assert len(widths) == len(dtypes) == 1, f"queries, keys and values differ: widths {widths}, {dtypes}"
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    return launch.forward(query, key, value, sinks, Mask(ends, positions, window), scale, softcap)


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    num_heads, num_tokens, width = query.shape
    output = query.new_empty(num_tokens, num_heads, width).transpose(0, 1)
    return output, query.new_empty(num_heads, num_tokens, dtype=torch.float32)


@torch.library.custom_op("rlplug_optims::tree_attention_backward", mutates_args=(), tags=(ANY_STRIDES,))
def _backward(
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    ends: Tensor,
    positions: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and sinks, the last one empty without any; all contiguous as
    [N, H, head_dim]."""
    from rlplug_optims.shared_prefixes import launch

    d_output, query, key, value = (
        each if each.stride(-1) == 1 else each.contiguous() for each in (d_output, query, key, value)
    )
    mask = Mask(ends, positions, window)
    dq, dk, dv, delta = launch.backward(d_output, query, key, value, output, lse, mask, scale, softcap)
    if sinks is None:
        return dq, dk, dv, query.new_empty(0)
    weights = torch.exp2(sinks.float()[:, None] / math.log(2) - lse)  # of each query's sum; its value is 0
    return dq, dk, dv, -(weights * delta).sum(dim=1).to(sinks.dtype)


@_backward.register_fake
def _(_d_output: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *_: Any) -> Any:
    found = [
        each.new_empty(each.shape[1], each.shape[0], each.shape[2]).transpose(0, 1) for each in (query, key, value)
    ]
    return *found, query.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, d_output: Tensor, _d_lse: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: checkpointing computes them anew for each request
    *gradients, d_sinks = _backward(d_output, *saved, ctx.scale, ctx.window, ctx.softcap)
    return *gradients, None if saved[3] is None else d_sinks, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
OPERATOR: Final = torch.ops.rlplug_optims.tree_attention.default
"""Attention, as graphs and checkpointing know it."""
