"""``PrefixLayout``: plans which rows a pass computes together, and packs them so that what they share is there once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rlplug.models.packing import PackedMicroBatch, PackedTokens, pack
from rlplug.training.row_layout import Bundle, RowLayout
from rlplug.types import StepBatch
from rlplug_optims.shared_prefixes.segments import SegmentAttention
from rlplug_optims.shared_prefixes.tree import TreeRow, depth_first, tree_row

if TYPE_CHECKING:
    from rlplug_optims.shared_prefixes.tree_attention import TreeAttention

LEAST_SHARE: Final = 0.1
"""Least share of its tokens that a row must share: with less it keeps flash attention for whole rows. Where both take
the same time was not measured."""
MANY: Final = 256
"""Bundles that balance over ranks without being cut."""


class PrefixLayout(RowLayout):
    """Computes what completions of a group have in common, the prompt first of all, once.

    Args:
        on_gpu: Attend with the kernels for trees, not segment by segment.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    def describe(self) -> str:
        return "by kernels for trees" if self.on_gpu else "segment by segment"

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def places(self, batch: StepBatch) -> NDArray[Any]:
        order = depth_first(_sequences(batch, "input_ids"), batch.per_sequence["group_index"])
        columns = np.zeros((batch.num_sequences, 2), np.int64)
        columns[order.rows] = np.stack([np.arange(len(order.rows)), order.shared], axis=1)
        return columns

    def bundles(
        self, table: NDArray[Any], rows: Sequence[int], max_tokens: float, max_rows: float
    ) -> Iterator[list[Bundle]]:
        forest = Forest(table)
        groups = forest.groups(rows)
        num_parts, num_bundles, largest = 1, 0, max(map(len, groups))
        while num_parts < 2 * largest:  # whole groups, their halves, their quarters, ...
            way: list[Bundle] = []
            for group in groups:
                way += forest.cut(group, max_tokens, min(-(-len(group) // num_parts), max_rows))
            if len(way) > num_bundles:
                yield way
            num_parts, num_bundles = 2 * num_parts, len(way)
            if num_bundles >= MANY:
                return

    def num_tokens(self, table: NDArray[Any], passes: Sequence[Sequence[int]]) -> int:
        forest = Forest(table)
        return sum(map(forest.num_tokens, passes))

    # ---- the rows of a pass -----------------------------------------------------------------------------------------

    def pack(
        self, rows: StepBatch, sequence_rank: int, sequence_size: int, sequence_group: dist.ProcessGroup | None
    ) -> PackedMicroBatch:
        sequences, trains = _sequences(rows, "input_ids"), _sequences(rows, "response_mask")
        order = depth_first(sequences, rows.per_sequence["group_index"])
        if not is_tree(rows.lengths[order.rows], order.shared):
            return pack(rows, sequence_rank, sequence_size, sequence_group)
        row = tree_row(sequences, trains, order, -(-order.num_tokens(sequences) // sequence_size) * sequence_size)
        whole = PackedTokens(
            input_ids=torch.from_numpy(row.ids[None]),
            position_ids=torch.from_numpy(row.positions[None]),
            cu_seqlens=torch.tensor([0, len(row.ids)], dtype=torch.int32),
            max_length=int(rows.lengths.max()),
            predicting=torch.from_numpy(row.predicting),
            targets=torch.from_numpy(row.targets),
            slots=torch.arange(len(row.targets)),
            num_trained=len(row.targets),
            shared=_tree_attention(row) if self.on_gpu else SegmentAttention(row),
        )
        return PackedMicroBatch(rows.tokens, whole.part(sequence_rank, sequence_size, sequence_group))


def _tree_attention(row: TreeRow) -> TreeAttention:
    from rlplug_optims.shared_prefixes.tree_attention import TreeAttention  # a plan computes nothing with its operators

    return TreeAttention.of(row)


def is_tree(lengths: NDArray[Any], shared: NDArray[Any]) -> bool:
    """Return whether a pass over some rows computes shared tokens once: where one of them shares enough.

    Of more rows that is true if it is true of some of them, so no pass computes more than was planned.
    """
    return bool((shared >= LEAST_SHARE * np.maximum(lengths, 1)).any())


def _sequences(batch: StepBatch, name: str) -> list[NDArray[Any]]:
    """Return the part of an array [N] that each sequence has."""
    return np.split(batch.per_token[name], batch.ends[1:-1]) if batch.num_sequences else []


class Forest:
    """The trees of a step's rows, one a group, as the table of its rows tells of them.

    Args:
        table: That of :class:`~rlplug.training.step_rows.StepRows`.
    """

    def __init__(self, table: NDArray[Any]) -> None:
        self.table = table
        # a group lies on one rank; if it lay on two, each part would be a tree of its own
        order = np.lexsort((table["place"], table["home"], table["group"]))
        self._places = np.empty(len(table), np.int64)
        self._places[order] = np.arange(len(table))
        sorted_rows = table[order]
        begins = (sorted_rows["group"][1:] != sorted_rows["group"][:-1]) | (
            sorted_rows["home"][1:] != sorted_rows["home"][:-1]
        )
        self._shared = np.where(np.append(True, begins), 0, sorted_rows["shared"])

    def groups(self, rows: Sequence[int]) -> list[list[int]]:
        """Return ``rows`` depth first, those of each group together."""
        ordered = np.asarray(rows)[self._places[list(rows)].argsort()]
        keys = self.table[["group", "home"]][ordered]
        return [part.tolist() for part in np.split(ordered, np.flatnonzero(keys[1:] != keys[:-1]) + 1)]

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Return the tokens that a pass over some rows computes."""
        groups = self.groups(rows)
        shared = np.concatenate([self.common(group) for group in groups])
        lengths = self.table["length"][np.concatenate(groups)]
        return int(lengths.sum() - (shared.sum() if is_tree(lengths, shared) else 0))

    def bundle(self, rows: Sequence[int]) -> Bundle:
        """Return some rows of a group, depth first, as what one pass computes together."""
        lengths, shared = self.table["length"][rows], self.common(rows)
        shared = shared if is_tree(lengths, shared) else np.zeros_like(shared)
        predicted = int(self.table["num_tokens"][rows].sum())
        pairs = float((lengths.astype(np.float64) ** 2 - shared.astype(np.float64) ** 2).sum())
        return Bundle(tuple(rows), max(int((lengths - shared).sum()), predicted), pairs)

    def pays(self, rows: Sequence[int]) -> bool:
        """Return whether some rows of a group share enough to be computed together."""
        return bool(self.common(rows).sum() >= LEAST_SHARE * max(self.table["length"][rows].sum(), 1))

    def cut(self, rows: Sequence[int], max_tokens: float, max_rows: float) -> Iterator[Bundle]:
        """Cut some rows of a group, depth first, into bundles within the limits; one row may have more tokens.

        Rows of a group that shares too little are bundles of their own.
        """
        max_rows = max_rows if self.pays(rows) else 1
        part: list[int] = []
        num_tokens = num_predicted = 0
        lengths, predicted = self.table["length"][rows], self.table["num_tokens"][rows]
        shared = self.common(rows)
        shared = np.where(shared >= LEAST_SHARE * lengths, shared, 0)  # a bundle that shares less shares nothing
        for row, length, common, trained in zip(rows, lengths, shared, predicted, strict=True):
            fits = max(num_tokens + length - common, num_predicted + trained) <= max_tokens
            if part and (len(part) >= max_rows or not fits):
                yield self.bundle(part)
                part, common, num_tokens, num_predicted = [], 0, 0, 0
            part.append(row)
            num_tokens, num_predicted = num_tokens + length - common, num_predicted + trained
        yield self.bundle(part)

    def common(self, rows: Sequence[int]) -> NDArray[Any]:
        """Return the tokens that each of some rows of a group shares with the one before it, 0 for the first."""
        places = self._places[list(rows)]
        if len(rows) < 2:
            return np.zeros(len(rows), np.int64)
        least: NDArray[Any] = np.minimum.reduceat(self._shared[: places[-1] + 1], places[:-1] + 1)
        return np.concatenate([[0], least])
