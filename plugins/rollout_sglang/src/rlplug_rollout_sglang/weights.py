"""How a bucket of weights becomes what SGLang reads in its own processes: one tensor on the GPU, and a handle to it."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Final

import torch
import torch.multiprocessing  # it teaches ForkingPickler to hand tensors on
from torch import Tensor

from rlplug.interfaces import Bucket

ALIGNMENT: Final = 256
"""Bytes to a multiple of which each tensor begins, so that it can be read in its own dtype."""


def flattened(bucket: Bucket) -> tuple[Tensor, list[SimpleNamespace]]:
    """Return a copy of a bucket, uint8 [bytes] on the same device, and where in it each tensor is.

    The entries have what SGLang reads of its ``FlattenedTensorMetadata``. It un-pickles no class but its own and a few
    plain ones, of which ``SimpleNamespace`` is one, so the trainer needs nothing of SGLang.
    """
    entries: list[SimpleNamespace] = []
    start = 0
    for name, tensor in bucket:
        end = start + tensor.nbytes
        entries.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=end - start
            )
        )
        start = -(-end // ALIGNMENT) * ALIGNMENT
    assert entries, "a bucket has weights"
    flat = torch.empty(start, dtype=torch.uint8, device=bucket[0][1].device)
    for entry, (_, tensor) in zip(entries, bucket, strict=True):
        flat[entry.start_idx : entry.end_idx].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return flat, entries


def serialised(flat: Tensor, entries: list[SimpleNamespace]) -> bytes:
    """Return a handle to ``flat``, which must stay as it is until SGLang has answered, and the entries."""
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump({"flattened_tensor": flat, "metadata": entries})
    return buffer.getvalue()
