"""Norm and clipping of gradients that are sharded over several meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlplug.distributed.mesh import split_axes

ShardedOver = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and the axes of it that shard a tensor; along the other axes every rank holds the same."""


@torch.no_grad()
def total_norm(gradients: Iterable[DTensor]) -> Tensor:
    """Return the 2-norm of all gradients together, a float64 scalar that is equal on all ranks. Collective.

    Each rank squares its own shards. The sums of squares of gradients that are sharded alike are reduced over the axes
    that shard them: one number per kind of sharding, and an axis that only replicates a gradient adds nothing.
    """
    parts: dict[ShardedOver, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        parts[gradient.device_mesh, tuple(split_axes(gradient))].append(gradient.to_local())
    squares = [_sum_over(_squares(local), mesh, axes) for (mesh, axes), local in parts.items()]
    return torch.stack(squares).sum().sqrt()


@torch.no_grad()
def scale_to_norm(gradients: Sequence[DTensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of norm ``norm`` in place to at most ``max_norm``, as ``torch.nn.utils`` does."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([gradient.to_local() for gradient in gradients], scale.float())


def _squares(local: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(local)).double().square().sum()


def _sum_over(value: Tensor, mesh: DeviceMesh, axes: tuple[int, ...]) -> Tensor:
    for axis in axes:
        dist.all_reduce(value, group=mesh.get_group(axis))
    return value
