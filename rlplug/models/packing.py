"""Packing: the sequences of a micro-batch end to end in one row, without padding.

Shape legend, besides that of ``types.py``:
    N  tokens of all sequences
    n  tokens of this rank's part of the packed row: N, or with sequence parallelism N / sequence_size, rounded up
    S  sequences in the packed row
    K  trainable tokens of all sequences
    k  those of them that this rank predicts; all, or with sequence parallelism some
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlplug.models.attention.sequences import LONG, SharedAttention
from rlplug.types import Batch, StepBatch

STEP: Final = 256
"""Lengths of such rows are multiples of this, because cuDNN plans its kernel anew for each length."""


@dataclass(frozen=True)
class PackedTokens:
    """Packed row of a micro-batch, and which of its tokens predict."""

    input_ids: Tensor
    """int64 [1, n]: token ids"""
    position_ids: Tensor
    """int64 [1, n]: positions within each sequence, from 0; 0 in the filling at the end of the row"""
    cu_seqlens: Tensor
    """int32 [S + 1]: cumulative lengths of the sequences in the whole row of N tokens"""
    max_length: int
    """Tokens of the longest sequence."""
    predicting: Tensor
    """int64 [k]: positions, below n, whose next token trains; never empty: a dummy where this rank predicts none"""
    targets: Tensor
    """int64 [k]: ids of those next tokens"""
    slots: Tensor
    """int64 [k]: index of each among the K tokens, and K for the dummy"""
    num_trained: int
    """K."""
    routed_experts: Tensor | None = None
    """int8 or int16 [n, L, k]: experts to replay, -1 where the routers decide; ``None`` without router replay"""
    sequence_group: dist.ProcessGroup | None = None
    """Process group of the ranks that hold the parts of the row; ``None`` when this rank has all of it."""
    shared: SharedAttention | None = None
    """Attention over the row where sequences share tokens; ``None`` where they are end to end."""

    def part(self, index: int, num_parts: int, sequence_group: dist.ProcessGroup | None) -> PackedTokens:
        """Return what one of the ranks that share this whole row has of it."""
        first = index * (size := self.input_ids.shape[1] // num_parts)
        predicting = self.predicting - first
        inside = (predicting >= 0) & (predicting < size)
        of_part: Any = {"predicting": predicting[inside], "targets": self.targets[inside], "slots": self.slots[inside]}
        if not inside.any():  # a dummy: the pass must still run, for the collectives in it
            zero = torch.zeros(1, dtype=torch.int64)
            of_part = {"predicting": zero, "targets": zero, "slots": zero + self.num_trained}
        of_part["routed_experts"] = None if self.routed_experts is None else self.routed_experts[first : first + size]
        ids, positions = self.input_ids[:, first : first + size], self.position_ids[:, first : first + size]
        group = sequence_group if num_parts > 1 else None
        return dataclasses.replace(self, **of_part, input_ids=ids, position_ids=positions, sequence_group=group)

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
        further = {"sequence_group": self.sequence_group, "shared": self.shared}
        return inputs | {name: value for name, value in further.items() if value is not None}

    def of_all_parts(self, values: Tensor) -> Tensor:
        """Return float ``values`` [k] of the tokens that this rank predicts with those of the other parts: [K]."""
        if self.sequence_group is None:
            return values[: self.num_trained]  # without the dummy, to which the gradient is 0
        part = values.new_zeros(self.num_trained + 1).scatter(0, self.slots, values)[: self.num_trained]
        from rlplug.distributed.sequence_parallel import sum_of_parts

        return sum_of_parts(part, self.sequence_group)

    def to(self, device: torch.device | str) -> PackedTokens:
        """Return a copy with all tensors on ``device``."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: Any = {name: to_device(t, device) for name, t in named.items() if isinstance(t, Tensor)}
        return dataclasses.replace(self, **moved, shared=self.shared and self.shared.to(device))


@dataclass(frozen=True)
class PackedMicroBatch:
    """Micro-batch: its tokens that train, for losses, and all of its tokens, for the models."""

    batch: Batch
    packed: PackedTokens

    def to(self, device: torch.device | str) -> PackedMicroBatch:
        """Return a copy with all tensors on ``device``."""
        return PackedMicroBatch(self.batch.map(lambda tensor: to_device(tensor, device)), self.packed.to(device))


def pack(
    rows: StepBatch, sequence_rank: int = 0, sequence_size: int = 1, sequence_group: dist.ProcessGroup | None = None
) -> PackedMicroBatch:
    """Pack sequences into one row, on the CPU.

    The row is filled up to a multiple of ``sequence_size``, and one long sequence to a multiple of ``STEP`` as well.
    The filling belongs to the last sequence: attention is causal, so no token before it changes. Its positions are 0,
    because a model may have none beyond those of a sequence.

    ``rows`` are at least one. ``sequence_size`` ranks, of ``sequence_group``, share the row.
    """
    # in numpy, because waking torch's host threads takes longer than these operations
    ids, trains, lengths = rows.per_token["input_ids"], rows.per_token["response_mask"], rows.lengths.copy()
    starts, num_tokens = rows.ends[:-1], len(ids)
    assert not trains[starts[lengths > 0]].any(), "nothing predicts the first token of a sequence"
    filling = -num_tokens % (sequence_size * (STEP if len(lengths) == 1 and num_tokens >= LONG else 1))
    nothing = np.zeros(filling, np.int64)
    row_ids = np.concatenate([ids.astype(np.int64), nothing])
    position_ids = np.concatenate([np.arange(num_tokens) - np.repeat(starts, lengths), nothing])
    lengths[-1] += filling

    places = trains.nonzero()[0]
    if (experts := rows.per_token.get("routed_experts")) is not None:
        from rlplug.models.routers import experts_of_row
    whole = PackedTokens(
        input_ids=torch.from_numpy(row_ids[None]),
        position_ids=torch.from_numpy(position_ids[None]),
        cu_seqlens=torch.from_numpy(np.append(starts, len(row_ids)).astype(np.int32)),
        max_length=int(lengths.max()),
        predicting=torch.from_numpy(places - 1),  # the token before one that trains predicts it
        targets=torch.from_numpy(row_ids[places]),
        slots=torch.arange(len(places)),
        num_trained=len(places),
        routed_experts=None if experts is None else experts_of_row(experts, len(row_ids)),
    )
    return PackedMicroBatch(rows.tokens, whole.part(sequence_rank, sequence_size, sequence_group))


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return ``tensor`` on ``device``.

    A copy from pageable memory makes the host wait for all work that the GPU has queued. A copy from pinned memory,
    which torch caches and reuses, does not.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
