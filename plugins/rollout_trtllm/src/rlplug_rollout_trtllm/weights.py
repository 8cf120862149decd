"""How a bucket of weights becomes what TensorRT-LLM's workers read: one buffer on the GPU, and handles to tensors."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from rlplug.errors import RunError
from rlplug.interfaces import Bucket

ALIGNMENT: Final = 256
"""Bytes to a multiple of which each tensor begins, so that it can be read in its own dtype."""

Reduce: TypeAlias = Callable[[Tensor], tuple[Any, tuple[Any, ...]]]
"""From a tensor to what makes it again in another process, and its arguments."""


@dataclass(frozen=True)
class Slot:
    """Where in a flat buffer a tensor is; plain data, so that it can be sent."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Such as ``bfloat16``."""
    start: int
    """In bytes."""
    end: int


def flattened(bucket: Bucket) -> tuple[Tensor, list[Slot]]:
    """Return a copy of a bucket, uint8 [bytes] on the same device, and where in it each tensor is.

    A copy, since the bucket's own memory is used again while the engine may still read.
    """
    slots: list[Slot] = []
    start = 0
    for name, tensor in bucket:
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append(Slot(name, tuple(tensor.shape), dtype, start, start + tensor.nbytes))
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    assert slots, "a bucket has weights"
    flat = torch.empty(start, dtype=torch.uint8, device=bucket[0][1].device)
    for slot, (_, tensor) in zip(slots, bucket, strict=True):
        flat[slot.start : slot.end].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return flat, slots


def tensors_of(flat: Tensor, slots: Iterable[Slot]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a flat buffer by name; they share its memory."""
    return [(s.name, flat[s.start : s.end].view(getattr(torch, s.dtype)).view(s.shape)) for s in slots]


def serialised(named: Iterable[tuple[str, Tensor]], reduce: Reduce) -> str:
    """Return handles to tensors, which must stay as they are until the engine has answered, as its workers read them.

    Only globals of torch and plain values are in it: the workers un-pickle nothing else.
    """
    handles = [(name, reduce(tensor)) for name, tensor in named]
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")


def merged(payloads: Iterable[dict[str, str]]) -> dict[str, str]:
    """Return the payloads of all GPUs of an engine as one, by the GPU's UUID.

    Raises:
        RunError: Two are of the same GPU.
    """
    together: dict[str, str] = {}
    for payload in payloads:
        if shared := together.keys() & payload.keys():
            raise RunError(f"two ranks that share an engine train on the same GPU, {min(shared)}.")
        together |= payload
    return together
