"""Attention over a tree row by torch, segment by segment, on any device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplug.models.attention.sequences import Sequences
from rlplug.models.packing import to_device
from rlplug_optims.shared_prefixes.tree import Segment, TreeRow

MOST_PAIRS: Final = 1 << 24
"""Pairs of a query and a key, padding included, whose mask is in memory at a time where segments attend."""


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
