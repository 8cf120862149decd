"""Walks a sharded model and yields its full weights in buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlplug.interfaces.weight_sync import Bucket


@torch.no_grad()
def weight_buckets(model: nn.Module, dtype: torch.dtype, max_bytes: int = 1 << 30) -> Iterator[Bucket]:
    """Yield every parameter of ``model`` in ``dtype``, unsharded, under its Hugging Face name.

    Collective: every rank must exhaust the iterator, since sharded parameters are gathered when their turn comes. Tied
    parameters travel once, under the name that comes first. A bucket holds at most ``max_bytes``, unless it is a single
    tensor; while it is made, its bytes are there twice.
    """
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, parameter in model.named_parameters():
        num_bytes = parameter.numel() * dtype.itemsize
        if pending and size + num_bytes > max_bytes:
            yield _gather(pending, dtype)
            pending, size = [], 0
        pending.append((name, parameter.detach()))
        size += num_bytes
    if pending:
        yield _gather(pending, dtype)


def _gather(named: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> Bucket:
    """Return full tensors; those that FSDP shards cross the links together, once for each process group."""
    full: dict[str, Tensor] = {}
    together: dict[dist.ProcessGroup, dict[str, DTensor]] = {}
    for name, tensor in named:
        if not isinstance(tensor, DTensor):
            full[name] = tensor.to(dtype)
        elif tensor.device_mesh.size() == 1:
            full[name] = tensor.to_local().to(dtype)
        elif (axis := _rows_axis(tensor)) is not None:
            together.setdefault(tensor.device_mesh.get_group(axis), {})[name] = tensor
        else:
            narrow: Any = tensor.to(dtype)  # first: half the bytes travel
            full[name] = narrow.full_tensor()
    for group, tensors in together.items():
        full |= _gather_rows(tensors, group, dtype)
    return [(name, full[name]) for name, _ in named]


def _rows_axis(tensor: DTensor) -> int | None:
    """Return the axis of the mesh over which rows are sharded, if that is all that is done to the tensor."""
    sharded = [axis for axis, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    if len(sharded) != 1:
        return None
    (axis,) = sharded
    placement = tensor.placements[axis]
    return axis if type(placement) is Shard and placement.dim == 0 else None


def _gather_rows(tensors: dict[str, DTensor], group: dist.ProcessGroup, dtype: torch.dtype) -> dict[str, Tensor]:
    """All-gather tensors whose rows are sharded over ``group``, in one collective operation.

    Rank r holds rows r * c to (r + 1) * c of a tensor, as far as it has them, with c rounded up: behind each other, and
    cut at the end, the ranks' parts are the tensor.
    """
    size = dist.get_world_size(group)
    locals_ = {name: tensor.to_local() for name, tensor in tensors.items()}
    spans = {name: -(-t.shape[0] // size) * t.shape[1:].numel() for name, t in tensors.items()}
    device = next(iter(locals_.values())).device
    mine = torch.empty(sum(spans.values()), dtype=dtype, device=device)
    offset = 0
    for name, local in locals_.items():
        mine[offset : offset + local.numel()].copy_(local.reshape(-1))
        offset += spans[name]
    everyone = torch.empty(size * len(mine), dtype=dtype, device=device)
    dist.all_gather_into_tensor(everyone, mine, group=group)
    parts = torch.split(everyone.view(size, -1), list(spans.values()), dim=1)
    return {
        name: part.reshape(-1)[: tensor.numel()].view(tensor.shape)
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }
