"""Attention over a tree row: FlexAttention on GPUs, and each segment with all tokens before it elsewhere."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from rlplug.models.attention.sequences import Sequences
from rlplug.models.packing import to_device
from rlplug_optims.compiler import stop_when_not_compiled
from rlplug_optims.shared_prefixes.tree import Segment, TreeRow

BLOCK: Final = 128
"""Tokens of a block of FlexAttention's masks, of which a row is a multiple."""
MOST_PAIRS: Final = 1 << 24
"""Pairs of a query and a key, padding included, whose mask is in memory at a time where segments attend."""
NUM_LENGTHS: Final = 256
"""Lengths of rows, times windows and kinds of passes, that are compiled at most."""
NUM_MASKS: Final = 8
"""Masks that are kept: those of the windows of a model's layers, for the row that is computed."""


@dataclass(frozen=True)
class Segments:
    """Segments of about the same size, padded to the largest.

    G is their number, q that of the largest one's tokens, and k that of the tokens of its path, its own included.
    """

    queries: Tensor
    """int64 [G, q]: places of their tokens in the row, the padding clamped"""
    keys: Tensor
    """int64 [G, k]: places of their paths in the row, the padding clamped"""
    depths: Tensor
    """int64 [G, q]: position of each query in its sequence, which is that of its key among ``keys``"""

    @staticmethod
    def of(segments: Sequence[Segment]) -> tuple[Segments, NDArray[Any], NDArray[Any]]:
        """Return segments, which of the queries [G, q] are real, and the places of those in the row."""
        own = np.array([each.stop - each.start for each in segments])
        depth = np.array([len(each.path) for each in segments])
        queries = np.arange(own.max()) + np.array([each.start for each in segments])[:, None]
        is_real = np.arange(own.max()) < own[:, None]
        keys = np.zeros((len(segments), depth.max()), np.int64)
        for row, each in zip(keys, segments, strict=True):
            row[: len(each.path)] = each.path
        depths = (depth - own)[:, None] + np.arange(own.max())
        clamped = np.where(is_real, queries, queries[:, :1])
        return Segments(*map(torch.from_numpy, (clamped, keys, depths))), is_real, queries[is_real]

    def to(self, device: torch.device | str) -> Segments:
        return Segments(*(to_device(tensor, device) for tensor in (self.queries, self.keys, self.depths)))


class SegmentAttention:
    """Attends with the tokens of each segment to its path, exactly, on any device and in any dtype.

    Args:
        row: Tokens as a tree.
    """

    def __init__(self, row: TreeRow) -> None:
        sizes: dict[tuple[int, int], list[Segment]] = {}
        for each in row.segments():
            sizes.setdefault(((each.stop - each.start).bit_length(), len(each.path).bit_length()), []).append(each)
        parts = []
        for (own, depth), alike in sizes.items():
            most = max(1, MOST_PAIRS >> own + depth)
            parts += [Segments.of(alike[first : first + most]) for first in range(0, len(alike), most)]
        self._parts, is_real, places = zip(*parts, strict=True)
        of_parts = np.concatenate([each.ravel() for each in is_real]).nonzero()[0]
        order = np.empty(len(row.ids), np.int64)
        order[np.concatenate(places)] = of_parts
        self._order = torch.from_numpy(order)
        """int64 [N]: where each token of the row is among the queries of all parts, padding included"""

    def to(self, device: torch.device | str) -> SegmentAttention:
        moved = copy.copy(self)
        moved._parts = tuple(part.to(device) for part in self._parts)
        moved._order = to_device(self._order, device)
        return moved

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        """Return attention [H, N, head_dim]; see :class:`~rlplug.models.attention.sequences.SharedAttention`."""
        outputs = []
        for part in self._parts:
            taken = ((query, part.queries), (key, part.keys), (value, part.keys))
            q, k, v = (each[:, places].transpose(0, 1) for each, places in taken)  # [G, heads, q or k, d]
            distance = part.depths[:, None, :, None] - torch.arange(part.keys.shape[1], device=query.device)
            seen = (distance >= 0) & (distance < (sequences.window or part.keys.shape[1]))
            if sequences.softcap is not None or sequences.sinks is not None:
                from rlplug.models.attention.products import attention_from_products

                output = attention_from_products(q, k, v, seen, sequences)
            else:
                how: Any = {"attn_mask": seen, "scale": sequences.scale, "enable_gqa": True}
                output = nn.functional.scaled_dot_product_attention(q, k, v, **how)
            outputs.append(output.transpose(0, 1).flatten(1, 2))
        return torch.cat(outputs, dim=1)[:, self._order]


@dataclass(frozen=True)
class FlexAttention:
    """Attends with one kernel, compiled by FlexAttention (Dong et al., arXiv:2412.05496), that skips unseen blocks.

    It is one operator, so that blocks around it are checkpointed and compiled as with plain attention. Its backward
    pass computes the forward pass again.
    """

    ends: Tensor
    """int32 [N], of the tree row."""
    positions: Tensor
    """int32 [N]."""

    @staticmethod
    def of(row: TreeRow) -> FlexAttention:
        return FlexAttention(torch.from_numpy(row.ends), torch.from_numpy(row.positions.astype(np.int32)))

    def to(self, device: torch.device | str) -> FlexAttention:
        moved = [to_device(tensor, device) for tensor in (self.ends, self.positions)]
        for tensor in moved:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return FlexAttention(*moved)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        """Return attention [H, N, head_dim]; see :class:`~rlplug.models.attention.sequences.SharedAttention`."""
        how = (sequences.scale, sequences.window or 0, sequences.softcap or 0.0)
        return _forward(query, key, value, sequences.sinks, self.ends, self.positions, *how)  # type: ignore[no-any-return]


@torch.library.custom_op("rlplug_optims::tree_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    ends: Tensor,
    positions: Tensor,
    scale: float | None,
    window: int,
    softcap: float,
) -> Tensor:
    """Return attention [H, N, head_dim] of a tree row; a window and a soft cap of 0 are none."""
    return flex(query, key, value, sinks, newest_mask(ends, positions, window), scale, softcap).contiguous()


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


@torch.library.custom_op("rlplug_optims::tree_attention_backward", mutates_args=())
def _backward(
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    ends: Tensor,
    positions: Tensor,
    scale: float | None,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and sinks, the last one empty without any."""
    with differentiable():
        query, key, value = leaves = [each.detach().requires_grad_() for each in (query, key, value)]
        if sinks is not None:
            sinks = sinks.detach().requires_grad_()
            leaves.append(sinks)
        output = flex(query, key, value, sinks, newest_mask(ends, positions, window), scale, softcap)
        found = torch.autograd.grad(output, leaves, d_output)
    dq, dk, dv, *d_sinks = (each.contiguous() for each in found)
    return dq, dk, dv, d_sinks[0] if d_sinks else query.new_empty(0)


@_backward.register_fake
def _(_d_output: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *_: Any) -> Any:
    shapes = [each.shape for each in (query, key, value)] + [(0,) if sinks is None else sinks.shape]
    return tuple(query.new_empty(shape) for shape in shapes)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, d_output: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: checkpointing computes them anew for each request
    *gradients, d_sinks = _backward(d_output, *saved, ctx.scale, ctx.window, ctx.softcap)
    return *gradients, None if saved[3] is None else d_sinks, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
OPERATOR: Final = torch.ops.rlplug_optims.tree_attention.default
"""Attention, as graphs and checkpointing know it."""


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Record operations inside an operator, where autograd is switched off."""
    key, without = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with without(key.AutogradFunctionality, False), without(key.ADInplaceOrView, False), torch.enable_grad():
        yield


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    mask: BlockMask,
    scale: float | None,
    softcap: float,
) -> Tensor:
    """Return FlexAttention [H, N, head_dim] with a mask."""
    output = compiled_flex()(
        *(states[None].contiguous() for states in (query, key, value)),
        score_mod=capped(softcap) if softcap else None,
        block_mask=mask,
        scale=scale,
        enable_gqa=True,
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is not None:  # a key without a value takes its share of each query's weights
        output, aux = output
        output = output * torch.sigmoid(aux.lse - sinks[:, None].to(aux.lse.dtype))[..., None].to(output.dtype)
    return output[0]  # type: ignore[no-any-return]


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    """Return FlexAttention compiled; masks of one length share a kernel, whatever their trees."""
    stop_when_not_compiled()  # eagerly it would hold all scores in memory
    torch._dynamo.config.recompile_limit = NUM_LENGTHS
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def capped(softcap: float) -> Callable[..., Tensor]:
    """Return the score_mod of ``c tanh(x / c)``."""

    def score_mod(score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


_MASKS: OrderedDict[tuple[int, int], tuple[Tensor, BlockMask]] = OrderedDict()
"""Newest masks, by the address of their row's ``ends``, which they keep from being given to another tensor."""


def newest_mask(ends: Tensor, positions: Tensor, window: int) -> BlockMask:
    """Return the mask of a row, which all layers with that window share; a window of 0 is none."""
    key = (ends.data_ptr(), window)
    if key not in _MASKS:
        _MASKS[key] = (ends, block_mask(ends, positions, window or None))
        if len(_MASKS) > NUM_MASKS:
            _MASKS.popitem(last=False)
    return _MASKS[key][1]


def sees(ends: Tensor, positions: Tensor, window: int | None) -> Callable[..., Tensor]:
    """Return the mask_mod of a row: the tokens before a query in its sequences, and itself."""

    def mask_mod(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    if window is None:
        return mask_mod
    width = window

    def windowed(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key]) & (positions[query] - positions[key] < width)

    return windowed


def block_mask(ends: Tensor, positions: Tensor, window: int | None) -> BlockMask:
    """Return a mask as ``create_block_mask(sees(...), ...)`` does, from (N / BLOCK)**2 comparisons, not N**2."""
    size = len(ends)
    assert size % BLOCK == 0, f"the row has {size} tokens, which is no multiple of {BLOCK}"
    first = torch.arange(0, size, BLOCK, device=ends.device)[:, None]  # of the block of queries
    ends_of, positions_of = ends.view(-1, BLOCK), positions.view(-1, BLOCK)
    below = first > first.T
    some = below & (first < ends_of.amax(dim=1)) | (first == first.T)
    full = below & (first + BLOCK - 1 < ends_of.amin(dim=1))
    if window is not None:
        lowest, highest = positions_of.amin(dim=1), positions_of.amax(dim=1)
        some &= (lowest[:, None] - highest < window) | (first == first.T)
        full &= highest[:, None] - lowest < window
    part = some & ~full
    return BlockMask(  # not from_kv_blocks, whose vmap fails inside an operator of a compiled block
        (size, size),
        *_listed(part),
        *_listed(full),
        *_listed(part.T),
        *_listed(full.T),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees(ends, positions, window),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of ``blocks`` has, and their indices in front, both int32 [1, 1, ...]."""
    blocks = blocks.contiguous()  # the kernels read indices as if they were
    indices = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1, dtype=torch.int32)[None, None], indices.int()[None, None]
