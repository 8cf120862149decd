"""Device mesh: maps ranks to shards of weights, to rows of a batch, and to parts of a sequence; norms over shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rlplug.types import MeshSizes

Item = TypeVar("Item")

AXES: Final = ("replicate", "shard", "sequence", "tensor")


def build_mesh(device_type: str, sizes: MeshSizes) -> DeviceMesh:
    """Return the four-axis mesh over all ranks; ranks of the tensor axis, which communicate most, are neighbours."""
    shape = (sizes.replicate, sizes.shard, sizes.sequence, sizes.tensor)
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


def weights_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh over which FSDP shards weights: [weights], or [replicate, weights] for HSDP.

    Sequence ranks use the same weights for parts of the same rows, so weights are sharded over them as well.
    """
    return with_replicas(mesh, mesh["shard", "sequence"]._flatten("weights"))


def with_replicas(mesh: DeviceMesh, weights: DeviceMesh) -> DeviceMesh:
    """Return the mesh over which FSDP shards what the ranks of ``weights``, an axis within each replica, share."""
    if mesh["replicate"].size() == 1:
        return weights
    # slicing a flattened axis out of its root is deprecated upstream, and no public call joins meshes
    return DeviceMesh._concatenate([mesh["replicate"], weights])


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the one-axis mesh over which the rows of a batch are divided."""
    return mesh["replicate", "shard"]._flatten("data")


def split_axes(tensor: DTensor) -> dict[int, int]:
    """Return the mesh axes that shard ``tensor``, each with the dimension of the tensor that it shards."""
    dims = {axis: getattr(placement, "dim", None) for axis, placement in enumerate(tensor.placements)}
    return {axis: dim for axis, dim in dims.items() if dim is not None}


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of the full tensor that are this rank's shard; a plain tensor is all of it.

    Inner axes of the mesh shard first: FSDP shards what tensor parallelism has left to a rank. Torch shards as
    ``torch.chunk`` does: shards have equal size, and the last may be shorter or empty.
    """
    slices = [slice(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, dim in reversed(split_axes(tensor).items()):
            slices[dim] = _chunk(slices[dim], mesh.size(axis), mesh.get_local_rank(axis))
        assert tuple(part.stop - part.start for part in slices) == tensor.to_local().shape
    return tuple(slices)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``tensor``, as a plain tensor that shares its memory."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _chunk(whole: slice, num_parts: int, index: int) -> slice:
    size = -(-(whole.stop - whole.start) // num_parts)
    return slice(min(whole.start + index * size, whole.stop), min(whole.start + (index + 1) * size, whole.stop))


def rank_share(items: Sequence[Item], rank: int, world_size: int) -> Sequence[Item]:
    """Return the contiguous share of ``rank`` in a list that every rank holds; shares differ by at most one item."""
    return items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size]


# ---- gradients that are sharded over several meshes -----------------------------------------------------------------


@torch.no_grad()
def total_norm(gradients: Iterable[DTensor]) -> Tensor:
    """Return the 2-norm of all gradients together, a float64 scalar that is equal on all ranks. Collective.

    Each rank squares its own shards. The sums of squares of gradients that are sharded alike are reduced over the axes
    that shard them: one number per kind of sharding, and an axis that only replicates a gradient adds nothing.
    """
    parts: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        parts[gradient.device_mesh, tuple(split_axes(gradient))].append(gradient.to_local())
    squares = []
    for (mesh, axes), local in parts.items():
        square = torch.stack(torch._foreach_norm(local)).double().square().sum()
        for axis in axes:
            dist.all_reduce(square, group=mesh.get_group(axis))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


@torch.no_grad()
def scale_to_norm(gradients: Sequence[DTensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of norm ``norm`` in place to at most ``max_norm``, as ``torch.nn.utils`` does."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([gradient.to_local() for gradient in gradients], scale.float())
