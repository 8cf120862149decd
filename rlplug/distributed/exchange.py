"""Arrays between ranks, as bytes and without pickle: concatenated on all of them, or each part to one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

Array = NDArray[Any]


def gather_arrays(array: Array, world_size: int, device: torch.device, cpu_group: dist.ProcessGroup) -> Array:
    """Return the concatenation of every rank's array along the first dimension, in rank order, on every rank.

    Collective. Lengths may differ; dtype and the other dimensions are the same on all ranks. The exchange of lengths
    in ``cpu_group``, of gloo, waits for all ranks; the default group, on ``device``, then exchanges the arrays.
    """
    lengths = torch.empty(world_size, 1, dtype=torch.int64)
    dist.all_gather(list(lengths), torch.tensor([len(array)]), group=cpu_group)
    sizes = lengths.flatten().tolist()
    padded = np.zeros((max(sizes), *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    sent = _as_bytes(padded).to(device)
    gathered = torch.empty(world_size, len(sent), dtype=torch.uint8, device=device)
    dist.all_gather(list(gathered), sent)
    parts = gathered.cpu().numpy().view(array.dtype).reshape(world_size, *padded.shape)
    return np.concatenate([part[:size] for part, size in zip(parts, sizes, strict=True)])


def exchange_arrays(parts: Sequence[Array], lengths: Sequence[int], device: torch.device) -> Array:
    """Send each rank its part, and return the concatenation of what all ranks sent to this one, in rank order.

    Collective.

    Args:
        parts: One for each rank of the default process group, on the host, possibly empty; of the same dtype and the
            same dimensions but the first, here and on all ranks.
        lengths: Length of what comes from each rank.
        device: Device of tensors that the group exchanges.
    """
    dtype, rest = parts[0].dtype, parts[0].shape[1:]
    num_bytes = dtype.itemsize * int(np.prod(rest, dtype=np.int64))
    sent = torch.cat([_as_bytes(part) for part in parts]).to(device)
    received = torch.empty(sum(lengths) * num_bytes, dtype=torch.uint8, device=device)
    dist.all_to_all_single(
        received, sent, [length * num_bytes for length in lengths], [len(part) * num_bytes for part in parts]
    )
    found: Array = received.cpu().numpy().view(dtype).reshape(-1, *rest)
    return found


def _as_bytes(array: Array) -> torch.Tensor:
    """Return the bytes of an array as a tensor: uint8 [bytes]."""
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
