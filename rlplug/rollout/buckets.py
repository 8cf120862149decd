"""Walks a sharded model and yields its full weights in buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlplug.interfaces.weight_sync import Bucket


@torch.no_grad()
def weight_buckets(model: nn.Module, dtype: torch.dtype, max_bytes: int = 1 << 30) -> Iterator[Bucket]:
    """Yield every parameter of ``model`` in ``dtype``, unsharded, under its Hugging Face name.

    Collective: every rank must exhaust the iterator, since a sharded parameter is gathered when its turn comes. Tied
    parameters travel once, under the name that comes first. No more than one bucket is alive at a time, unless a
    single tensor is larger than ``max_bytes``.
    """
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        tensor = tensor.to(dtype)  # before it is gathered: half the bytes travel
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
