"""Sequences that begin alike, as a tree: which tokens they share, and the order in which a row has them.

Sequences are laid out depth first: a prompt once, then what follows it in each sequence, at any depth (a turn, then the
branches after it). So the tokens that see token k are those of its subtree, the range ``k .. ends[k] - 1`` of the row:
one integer a token is the whole mask. The same layout, for prompts alone, is in verl's Prefix Grouper (arXiv
2506.05433); AReaL and NeMo-RL have trees too.

Shape legend, besides that of :mod:`rlplug.models.packing`:
    B  sequences
    N  tokens of the row, each shared one once, filling included
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


class Order(NamedTuple):
    """Rows in an order in which those of a group that begin alike follow each other."""

    rows: Array
    """int64 [B]: indices of the rows"""
    shared: Array
    """int64 [B]: tokens that each has in common with the one before it; 0 where that is of another group"""

    def num_tokens(self, sequences: Sequence[Array]) -> int:
        """Return the tokens of the tree."""
        return int(sum(map(len, sequences)) - self.shared.sum())


class Segment(NamedTuple):
    """Tokens of a row that follow each other in all sequences that have one of them."""

    start: int
    stop: int
    path: Array
    """int64 [d]: where the tokens of a sequence up to ``stop`` are in the row; its own are the last of them."""


@dataclass(frozen=True)
class TreeRow:
    """The row that some sequences become."""

    ids: Array
    """int64 [N]: token ids; 0 in the filling"""
    positions: Array
    """int64 [N]: position of each token in the sequences that have it; 0 in the filling"""
    ends: Array
    """int32 [N]: token k is seen by the tokens k .. ends[k] - 1; in the filling, by itself"""
    predicting: Array
    """int64 [K]: for each trained token, row after row, the position of the token before it in its sequence"""
    targets: Array
    """int64 [K]: ids of the trained tokens"""

    def segments(self) -> list[Segment]:
        """Return the segments, in the order of the row; each token of the filling is one."""
        goes_on = (self.positions[1:] == self.positions[:-1] + 1) & (self.ends[1:] == self.ends[:-1])
        starts = np.concatenate([[0], (~goes_on).nonzero()[0] + 1])
        found: list[Segment] = []
        ancestors: list[Segment] = []
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(self.ids)], strict=True):
            while ancestors and self.ends[ancestors[-1].start] <= start:
                ancestors.pop()
            own = np.arange(start, stop)
            path = np.concatenate([ancestors[-1].path, own]) if ancestors else own
            ancestors.append(Segment(start, stop, path))
            found.append(ancestors[-1])
        return found


def depth_first(sequences: Sequence[Array], groups: Sequence[int] | Array) -> Order:
    """Return the order of sequences in which those with a common beginning follow each other.

    Args:
        sequences: int32 token ids of each.
        groups: Sequences share within a group alone: equal ids of other prompts may have other images.
    """
    rows = sorted(range(len(sequences)), key=lambda row: (groups[row], sequences[row].astype(">i4").tobytes()))
    shared = np.zeros(len(rows), np.int64)
    for place in range(1, len(rows)):
        before, row = rows[place - 1], rows[place]
        if groups[before] == groups[row]:
            shared[place] = common_prefix(sequences[before], sequences[row])
    return Order(np.array(rows, dtype=np.int64), shared)


def common_prefix(one: Array, other: Array) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def tree_row(sequences: Sequence[Array], trains: Sequence[Array], order: Order, size: int | None = None) -> TreeRow:
    """Lay out sequences as one row.

    Args:
        sequences: Token ids of each.
        trains: bool of each: tokens that train, the first one never.
        order: Of these sequences, from :func:`depth_first`.
        size: Tokens of the row, filling included; by default there is none.
    """
    size = order.num_tokens(sequences) if size is None else size
    ids, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
    ends = np.arange(1, size + 1, dtype=np.int32)
    predicted: list[tuple[Array, Array]] = [(np.empty(0, np.int64), np.empty(0, np.int64))] * len(sequences)
    path, filled = np.empty(0, np.int64), 0  # where the tokens of the sequence before are in the row
    for row, shared in zip(order.rows.tolist(), order.shared.tolist(), strict=True):
        tokens = sequences[row]
        ends[path[shared:]] = filled  # no later sequence has these tokens
        added = np.arange(filled, filled + len(tokens) - shared)
        ids[added], positions[added] = tokens[shared:], np.arange(shared, len(tokens))
        path, filled = np.concatenate([path[:shared], added]), filled + len(added)
        columns = trains[row].nonzero()[0]
        predicted[row] = (path[columns - 1], tokens[columns].astype(np.int64))
    ends[path] = filled
    predicting, targets = (np.concatenate(parts) for parts in zip(*predicted, strict=True))
    return TreeRow(ids, positions, ends, predicting, targets)
