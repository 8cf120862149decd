"""A bucket of weights as one flat buffer, for engines that take one buffer instead of many tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rlplug.interfaces.weight_sync import Bucket

ALIGNMENT: Final = 256
"""Bytes to a multiple of which each tensor begins, so that it can be read in its own dtype."""


@dataclass(frozen=True)
class FlatTensor:
    """Place of a tensor in a flat buffer; plain data, so that it can be sent."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Such as ``bfloat16``."""
    start: int
    """In bytes."""
    end: int


def flatten_bucket(bucket: Bucket) -> tuple[Tensor, list[FlatTensor]]:
    """Return a copy of a bucket, uint8 [bytes] on the same device, and where in it each tensor is.

    It is a copy, since a bucket is valid until the next only, and an engine may read longer.
    """
    places: list[FlatTensor] = []
    start = 0
    for name, tensor in bucket:
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(FlatTensor(name, tuple(tensor.shape), dtype, start, start + tensor.nbytes))
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    assert places, "a bucket has weights"
    flat = torch.empty(start, dtype=torch.uint8, device=bucket[0][1].device)
    for place, (_, tensor) in zip(places, bucket, strict=True):
        flat[place.start : place.end].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return flat, places


def tensors_of(flat: Tensor, places: Iterable[FlatTensor]) -> Bucket:
    """Return the tensors of a flat buffer by name; they share its memory."""
    return [(p.name, flat[p.start : p.end].view(getattr(torch, p.dtype)).view(p.shape)) for p in places]
