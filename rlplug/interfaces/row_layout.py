"""Row layout interface: how the sequences of a micro-batch become one row that computes shared tokens once.

Without one, sequences are packed end to end (:func:`rlplug.models.packing.pack`), each with a copy of its prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from rlplug.models.attention import Sequences
    from rlplug.models.packing import PackedMicroBatch
    from rlplug.types import StepBatch


class Bundle(NamedTuple):
    """Rows of a step that one pass computes together."""

    rows: tuple[int, ...]
    """Their indices in the step."""
    tokens: int
    """Tokens that the pass computes for them, or predicts where those are more: its budget counts them."""
    pairs: float
    """Pairs of tokens that attention computes for them, as a multiple of which ``n**2`` is one sequence of n tokens."""


class SharedAttention(Protocol):
    """Attention over a packed row in which sequences share tokens."""

    def to(self, device: torch.device | str) -> SharedAttention:
        """Return a copy with all tensors on ``device``."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        """Return the attention of each token to those before it in its sequences, [H, N, head_dim].

        Args:
            query: [H, N, head_dim], the whole row.
            key: [H_kv, N, head_dim]; H is a multiple of H_kv.
            value: [H_kv, N, head_dim].
            sequences: Scale, window, soft cap and sinks of the layer; ``longest`` is that of a sequence, and
                ``borders`` are those of the row.
        """


class RowLayout(ABC):
    """Base class of row layouts. What ranks must do alike depends on ``table`` alone, which all of them have.

    ``table`` is that of :class:`~rlplug.training.step_rows.StepRows`: an entry for each row of the step, with its
    ``group``, its ``home``, its ``length``, ``num_tokens`` that train, and the two columns that :meth:`places` gives.
    """

    @abstractmethod
    def places(self, batch: StepBatch) -> NDArray[Any]:
        """Return the columns ``place`` and ``shared`` of this rank's rows, int64 [B, 2].

        ``place`` is where a row comes among those of its group, in an order in which rows that begin alike follow each
        other, and ``shared`` the number of tokens that it has in common with the one before it; 0 for the first.
        """

    @abstractmethod
    def bundles(
        self, table: NDArray[Any], rows: Sequence[int], max_tokens: float, max_rows: float
    ) -> list[list[Bundle]]:
        """Return ways to cut ``rows`` into bundles, at least one; the plan takes the one whose passes are shortest.

        Args:
            table: All rows of the step.
            rows: Those of a mini-batch; a way has each of them once.
            max_tokens: Most tokens of a bundle.
            max_rows: Most rows of a bundle.
        """

    @abstractmethod
    def pack(
        self, rows: StepBatch, sequence_rank: int, sequence_size: int, sequence_group: dist.ProcessGroup | None
    ) -> PackedMicroBatch:
        """Pack sequences into one row, as :func:`rlplug.models.packing.pack` does.

        Tokens that train keep their order: row after row, shared or not.
        """

    @abstractmethod
    def num_tokens(self, table: NDArray[Any], rows: Sequence[int]) -> int:
        """Return the tokens that one pass over ``rows`` computes."""

    @abstractmethod
    def describe(self) -> str:
        """Return what computes attention, for people."""
