"""Packing: the sequences of a micro-batch end to end in one row, without padding.

Shape legend, besides that of ``types.py``:
    N  tokens of all sequences
    n  tokens of this rank's part of the packed row: N, or with sequence parallelism N / sequence_size, rounded up
    S  sequences in the packed row
    K  trainable tokens among those that this rank predicts
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlplug.interfaces.router_replay import NOT_RECORDED
from rlplug.types import Batch

LONG: Final = 4096
"""Smallest length of a lone sequence, in tokens, at which cuDNN's attention kernel is used."""
STEP: Final = 256
"""Lengths of such rows are multiples of this, because cuDNN plans its kernel anew for each length."""


@dataclass(frozen=True)
class PackedTokens:
    """Packed row of a micro-batch, and the positions of its predictions in the padded [B, T] batch."""

    input_ids: Tensor
    """int64 [1, n]: token ids"""
    position_ids: Tensor
    """int64 [1, n]: positions within each sequence, from 0; 0 in the filling at the end of the row"""
    cu_seqlens: Tensor
    """int32 [S + 1]: cumulative lengths of the sequences in the whole row of N tokens"""
    max_length: int
    """Tokens of the longest sequence."""
    predicting: Tensor
    """int64 [K]: positions, below n, whose next token trains; never empty"""
    targets: Tensor
    """int64 [K]: ids of those next tokens"""
    slots: Tensor
    """int64 [K]: index ``b * T + t`` of each in the padded batch; ``B * T`` for a dummy token"""
    shape: tuple[int, int]
    """B and T of the padded batch."""
    routed_experts: Tensor | None = None
    """int8 or int16 [n, L, k]: experts to replay, -1 where the routers decide; ``None`` without router replay"""
    sequence_group: dist.ProcessGroup | None = None
    """Process group of the ranks that hold the parts of the row; ``None`` when this rank has all of it."""

    def model_inputs(self) -> dict[str, Any]:
        """Return the arguments of a transformers model's forward method, those of packed attention included."""
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
        """Return ``values`` [K] as float [B, T], with 0 where nothing trains, the same on all sequence ranks."""
        num_slots = self.shape[0] * self.shape[1]
        grid = values.new_zeros(num_slots + 1).scatter(0, self.slots, values)[:num_slots].view(self.shape)
        if self.sequence_group is None:
            return grid
        whole: Tensor = _SumOfParts.apply(grid, self.sequence_group)  # type: ignore[no-untyped-call]
        return whole

    def to(self, device: torch.device | str) -> PackedTokens:
        """Return a copy with all tensors on ``device``."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: Any = {name: to_device(t, device) for name, t in named.items() if isinstance(t, Tensor)}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class PackedMicroBatch:
    """Micro-batch of a step's batch, padded and packed."""

    batch: Batch
    """The padded micro-batch, [B, T]."""
    packed: PackedTokens
    """Its tokens without padding, for the models."""

    def to(self, device: torch.device | str) -> PackedMicroBatch:
        """Return a copy with all tensors on ``device``."""
        return PackedMicroBatch(self.batch.map(lambda tensor: to_device(tensor, device)), self.packed.to(device))


def pack_batch(
    batch: Batch,
    sequence_rank: int = 0,
    sequence_size: int = 1,
    sequence_group: dist.ProcessGroup | None = None,
) -> PackedMicroBatch:
    """Return a batch on the CPU with its packed tokens; see :func:`pack` for the arguments."""
    packed = pack(
        batch.input_ids, batch.attention_mask, batch.response_mask, sequence_rank, sequence_size, sequence_group
    )
    if batch.routed_experts is not None:  # only the models read them, so they move to the device once
        experts = pack_experts(batch.routed_experts, len(packed.input_ids[0]), sequence_rank)
        packed, batch = dataclasses.replace(packed, routed_experts=experts), batch.replace(routed_experts=None)
    return PackedMicroBatch(batch, packed)


def pack_experts(routed_experts: Tensor, size: int, sequence_rank: int) -> Tensor:
    """Return the experts of one rank's part of a row, [n, L, k]; -1 in the filling at the end of the row.

    Args:
        routed_experts: int8 or int16 [N, L, k], of the row's sequences end to end.
        size: n, tokens of each rank's part.
        sequence_rank: Index of the part.
    """
    part = routed_experts.numpy()[sequence_rank * size : (sequence_rank + 1) * size]
    filling = np.full((size - len(part), *part.shape[1:]), NOT_RECORDED, dtype=part.dtype)
    return torch.from_numpy(np.concatenate([part, filling]))


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    sequence_rank: int = 0,
    sequence_size: int = 1,
    sequence_group: dist.ProcessGroup | None = None,
) -> PackedTokens:
    """Pack right-padded sequences into one row.

    The row is filled up to a multiple of ``sequence_size``, and one long sequence to a multiple of ``STEP`` as well.
    The filling belongs to the last sequence: attention is causal, so no token before it changes. Its positions are 0,
    because a model may have none beyond those of a sequence.

    Args:
        input_ids: int64 [B, T], on the CPU, since lengths are read.
        attention_mask: bool [B, T]: real tokens.
        response_mask: bool [B, T]: tokens that train. Nothing predicts the first token of a sequence.
        sequence_rank: Index of the part of the row that this rank gets.
        sequence_size: Number of ranks that share the row.
        sequence_group: Process group of those ranks.
    """
    # in numpy, because waking torch's host threads takes longer than these operations
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
    row_indices, columns = trained[:, 1:].nonzero()
    predicting = starts[row_indices] + columns - first  # the token at columns predicts the one at columns + 1
    mine = (predicting >= 0) & (predicting < size)
    row_indices, columns, predicting = row_indices[mine], columns[mine] + 1, predicting[mine]
    slots, targets = row_indices * ids.shape[1] + columns, ids[row_indices, columns]
    if not len(predicting):  # a dummy token: the pass must still run, for the collectives in it
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
    """All-reduce whose gradient passes to each rank's part unchanged.

    Every rank computes the same loss from the sum, so each already has the whole gradient.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return ``tensor`` on ``device``.

    A copy from pageable memory makes the host wait for all work that the GPU has queued. A copy from pinned memory,
    which torch caches and reuses, does not.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
