"""Rows of a micro-batch laid end to end in one row, without padding.

Shape legend, besides that of ``types.py``:
    N  tokens of all rows
    n  tokens of this rank's part of the packed row: N, or with sequence parallelism N / sequence_size, rounded up
    S  sequences in the packed row
    K  tokens that train, among those that this rank predicts
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlplug.distributed.device_copy import to_device
from rlplug.types import Batch

LONG: Final = 4096
"""Tokens from which a sequence that has the row to itself gets the attention kernel for long ones."""
STEP: Final = 256
"""Such rows have a multiple of this many tokens, because that kernel is planned anew for each length."""


@dataclass(frozen=True)
class PackedTokens:
    """A packed row, and where its predictions belong in the [B, T] rows that it was made of."""

    input_ids: Tensor
    """int64 [1, n]"""
    position_ids: Tensor
    """int64 [1, n]: each sequence counts from 0; 0 in what fills the row"""
    cu_seqlens: Tensor
    """int32 [S + 1]: where sequences begin and end in the whole row of N tokens"""
    max_length: int
    """Tokens of the longest sequence."""
    predicting: Tensor
    """int64 [K]: the positions, of n, whose next token trains; never empty"""
    targets: Tensor
    """int64 [K]: those next tokens"""
    slots: Tensor
    """int64 [K]: ``b * T + t`` of each in the rows; ``B * T`` for one that belongs nowhere"""
    shape: tuple[int, int]
    """B, T"""
    sequence_group: dist.ProcessGroup | None = None
    """The ranks that hold the other parts of the row."""

    def model_inputs(self) -> dict[str, Any]:
        """Return what a transformers model is called with, attention's keyword arguments included."""
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "use_cache": False,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        }
        return inputs if self.sequence_group is None else inputs | {"sequence_group": self.sequence_group}

    def unpack(self, values: Tensor) -> Tensor:
        """Return float [B, T] with ``values`` [K] in their places and 0 elsewhere, the same on all sequence ranks."""
        num_slots = self.shape[0] * self.shape[1]
        grid = values.new_zeros(num_slots + 1).scatter(0, self.slots, values)[:num_slots].view(self.shape)
        if self.sequence_group is None:
            return grid
        whole: Tensor = _SumOfParts.apply(grid, self.sequence_group)  # type: ignore[no-untyped-call]
        return whole

    def to(self, device: torch.device | str) -> PackedTokens:
        """Return the same on ``device``."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: Any = {name: to_device(t, device) for name, t in named.items() if isinstance(t, Tensor)}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class PackedMicroBatch:
    """Rows of a step's batch, and the same tokens without padding, for the models."""

    batch: Batch
    """The padded rows, [B, T]."""
    packed: PackedTokens

    def to(self, device: torch.device | str) -> PackedMicroBatch:
        """Return the same on ``device``."""
        return PackedMicroBatch(self.batch.map(lambda tensor: to_device(tensor, device)), self.packed.to(device))


def pack_batch(
    batch: Batch,
    sequence_rank: int = 0,
    sequence_size: int = 1,
    sequence_group: dist.ProcessGroup | None = None,
) -> PackedMicroBatch:
    """Pack a batch, which is on the CPU; see :func:`pack` for the arguments."""
    packed = pack(
        batch.input_ids, batch.attention_mask, batch.response_mask, sequence_rank, sequence_size, sequence_group
    )
    return PackedMicroBatch(batch, packed)


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    sequence_rank: int = 0,
    sequence_size: int = 1,
    sequence_group: dist.ProcessGroup | None = None,
) -> PackedTokens:
    """Pack right-padded rows.

    Args:
        input_ids: int64 [B, T], on the CPU: lengths are read.
        attention_mask: bool [B, T]: real tokens.
        response_mask: bool [B, T]: tokens that train. The first token of a row is predicted by none.
        sequence_rank: Which part of the row this rank gets.
        sequence_size: How many ranks share it.
        sequence_group: Those ranks.

    The row is filled up to a multiple of ``sequence_size``, and one long sequence to a multiple of ``STEP`` as well.
    What fills it continues the last sequence: attention is causal, so nothing before it changes. Its positions do not
    continue, because a model may have none beyond those of a sequence.
    """
    # in numpy: with many host threads, torch takes longer to wake them than the operations last
    ids, real = input_ids.numpy(), attention_mask.numpy()
    trained = response_mask.numpy() & real
    lengths = real.sum(axis=1)
    starts = lengths.cumsum() - lengths
    num_tokens = int(lengths.sum())
    filling = -num_tokens % (sequence_size * (STEP if len(lengths) == 1 and num_tokens >= LONG else 1))
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    row_ids = np.concatenate([ids[real], np.zeros(filling, dtype=np.int64)])
    position_ids = np.concatenate([positions[real], np.zeros(filling, dtype=np.int64)])
    lengths[-1] += filling

    size = len(row_ids) // sequence_size
    first = sequence_rank * size
    rows, columns = trained[:, 1:].nonzero()
    predicting = starts[rows] + columns - first  # token columns + 1 is predicted where token columns is read
    mine = (predicting >= 0) & (predicting < size)
    rows, columns, predicting = rows[mine], columns[mine] + 1, predicting[mine]
    slots, targets = rows * ids.shape[1] + columns, ids[rows, columns]
    if not len(predicting):  # a pass must still run, for the collectives in it
        predicting, targets, slots = np.zeros(1, dtype=np.int64), row_ids[:1], np.array([ids.size])
    return PackedTokens(
        input_ids=torch.from_numpy(row_ids[None, first : first + size]),
        position_ids=torch.from_numpy(position_ids[None, first : first + size]),
        cu_seqlens=torch.from_numpy(np.append(starts, len(row_ids)).astype(np.int32)),
        max_length=int(lengths.max()),
        predicting=torch.from_numpy(predicting),
        targets=torch.from_numpy(targets),
        slots=torch.from_numpy(slots),
        shape=(ids.shape[0], ids.shape[1]),
        sequence_group=sequence_group if sequence_size > 1 else None,
    )


class _SumOfParts(torch.autograd.Function):
    """Adds up what the ranks of a group hold; each rank's part gets the gradient of the sum as it is.

    Every rank goes on to compute the same loss from the sum, so the gradient is whole on each already.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
