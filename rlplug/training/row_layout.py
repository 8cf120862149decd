"""Row layout interface: how sequences that share tokens become one row, in place of ``models.packing.pack``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from numpy.typing import NDArray

from rlplug.models.packing import PackedMicroBatch
from rlplug.types import StepBatch


class Bundle(NamedTuple):
    """Rows of a step that one pass computes together.

    Attributes:
        rows: Their indices in the step.
        tokens: Tokens that the pass computes for them, or predicts where those are more: its budget counts them.
        pairs: Pairs of tokens that attention computes for them, of which one sequence of n tokens has ``n**2``.
    """

    rows: tuple[int, ...]
    tokens: int
    pairs: float


class RowLayout(ABC):
    """Base class of row layouts. All ranks have the same ``table``, that of ``StepRows``, and plan by it alone."""

    @abstractmethod
    def places(self, batch: StepBatch) -> NDArray[Any]:
        """Return the columns ``place`` and ``shared`` of this rank's rows, int64 [B, 2].

        Places order the rows of a group so that those that begin alike follow each other; ``shared`` counts the tokens
        that a row has in common with the one before it.
        """

    @abstractmethod
    def bundles(
        self, table: NDArray[Any], rows: Sequence[int], max_tokens: float, max_rows: float
    ) -> Iterator[list[Bundle]]:
        """Yield ways to cut the ``rows`` of a mini-batch into bundles of at most so many tokens and rows.

        There is at least one, and each has every row once. The first one has the fewest tokens; the plan takes the one
        for which ranks wait least.
        """

    @abstractmethod
    def pack(
        self, rows: StepBatch, sequence_rank: int, sequence_size: int, sequence_group: dist.ProcessGroup | None
    ) -> PackedMicroBatch:
        """Pack sequences as :func:`rlplug.models.packing.pack` does; tokens that train keep their order."""

    @abstractmethod
    def num_tokens(self, table: NDArray[Any], passes: Sequence[Sequence[int]]) -> int:
        """Return the tokens that passes over some rows each compute in all."""

    @abstractmethod
    def describe(self) -> str:
        """Return what computes attention, for people."""
