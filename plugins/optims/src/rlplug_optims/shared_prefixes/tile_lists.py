"""Which tiles of queries and keys of a tree row the kernels compute."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

NUM_LISTS: Final = 24
"""Lists that are kept: for each window of a model's layers those of three kernels, for the row that is computed."""


class Mask(NamedTuple):
    """What each token of a row of N tokens sees."""

    ends: Tensor
    """int32 [N]: token k is seen by the queries ``k .. ends[k] - 1``"""
    positions: Tensor
    """int32 [N]: of each token in its sequences, read where there is a window"""
    window: int
    """Number of keys that a query sees, its own included; 0 for all."""

    def tiles(self, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """Return which tiles of so many queries and keys are seen as a whole, and which at least in part.

        Both are bool [N / num_queries, N / num_keys], rounded up.
        """
        first = torch.arange(0, len(self.ends), num_queries, device=self.ends.device)[:, None]
        first_key = torch.arange(0, len(self.ends), num_keys, device=self.ends.device)
        ends = _tiles(self.ends, num_keys)
        part = (first_key < first + num_queries) & (first < ends.amax(dim=1))
        whole = (first_key + num_keys - 1 <= first) & (first + num_queries - 1 < ends.amin(dim=1))
        if self.window:
            of_queries, of_keys = _tiles(self.positions, num_queries), _tiles(self.positions, num_keys)
            part &= of_queries.amin(dim=1)[:, None] - of_keys.amax(dim=1) < self.window
            whole &= of_queries.amax(dim=1)[:, None] - of_keys.amin(dim=1) < self.window
        return whole, part


class Lists(NamedTuple):
    """For each tile of queries the tiles of keys, or for each tile of keys those of queries."""

    tiles: Tensor
    """int32 [T, U]: of each of T tiles, the others: first those seen as a whole, then those seen in part"""
    num_tiles: Tensor
    """int32 [2, T]: how many are seen as a whole, and how many at least in part"""

    @staticmethod
    def of(whole: Tensor, part: Tensor) -> Lists:
        """Return the lists of the rows of :meth:`Mask.tiles`."""
        order = (part.int() + whole.int()).argsort(dim=1, descending=True, stable=True)
        order = order.int().contiguous()  # of transposed tiles it is not
        return Lists(order, torch.stack([whole.sum(dim=1), part.sum(dim=1)]).int())


_NEWEST: OrderedDict[tuple[int, int, int, int, bool], tuple[Mask, Lists]] = OrderedDict()
"""Newest lists, by the address of their row's ``ends``, which they keep from being given to another tensor."""


def newest_lists(mask: Mask, num_queries: int, num_keys: int, by_key: bool) -> Lists:
    """Return the lists of a row, which all layers with that window share."""
    key = (mask.ends.data_ptr(), mask.window, num_queries, num_keys, by_key)
    if key not in _NEWEST:
        whole, part = mask.tiles(num_queries, num_keys)
        _NEWEST[key] = (mask, Lists.of(whole.T, part.T) if by_key else Lists.of(whole, part))
        if len(_NEWEST) > NUM_LISTS:
            _NEWEST.popitem(last=False)
    return _NEWEST[key][1]


def _tiles(values: Tensor, size: int) -> Tensor:
    """Return int32 [N] as [N / size, size], rounded up, with zeros at the end."""
    return nn.functional.pad(values, (0, -len(values) % size)).view(-1, size)
