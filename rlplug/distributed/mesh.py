"""The device mesh: which ranks hold which weights, which rows of a batch, and which parts of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rlplug.errors import ConfigError

Item = TypeVar("Item")

AXES: Final = ("replicate", "shard", "sequence", "tensor")


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis of the mesh, outermost first."""

    replicate: int
    shard: int
    sequence: int
    tensor: int

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.sequence * self.tensor

    @property
    def data_size(self) -> int:
        """Parts that rows are spread over."""
        return self.replicate * self.shard

    @classmethod
    def from_world(cls, world_size: int, replicate: int, sequence: int, tensor: int) -> MeshSizes:
        """Return the sizes for ``world_size`` ranks: the shard axis takes what the others leave.

        Raises:
            ConfigError: A size is below 1, or does not divide the ranks that are left.
        """
        left = world_size
        for name, size in (("tensor", tensor), ("sequence", sequence), ("replicate", replicate)):
            if size < 1 or left % size:
                others = "" if left == world_size else f" ({world_size} ranks in all, the rest by the other axes)"
                raise ConfigError(
                    f"trainer.strategy.init_args.{name} is {size}, which does not divide {left} ranks{others}: give a "
                    "divisor, or change trainer.devices."
                )
            left //= size
        return cls(replicate, left, sequence, tensor)


def build_mesh(device_type: str, sizes: MeshSizes) -> DeviceMesh:
    """Return the four-axis mesh over all ranks; those of the tensor axis, which talk most, are neighbours."""
    shape = (sizes.replicate, sizes.shard, sizes.sequence, sizes.tensor)
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


def weights_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that FSDP shards weights over: [weights], or [replicate, weights] for HSDP.

    Sequence ranks see parts of the same rows with the same weights, so they share the shards as well.
    """
    weights = mesh["shard", "sequence"]._flatten("weights")
    if mesh["replicate"].size() == 1:
        return weights
    # slicing a flattened axis out of its root is deprecated upstream, and no public call joins meshes
    return DeviceMesh._concatenate([mesh["replicate"], weights])


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the one-axis mesh of the ranks that hold other rows than this one."""
    return mesh["replicate", "shard"]._flatten("data")


def split_axes(tensor: DTensor) -> dict[int, int]:
    """Return the axes of the mesh that split ``tensor``, and the tensor's dimension that each splits."""
    dims = {axis: getattr(placement, "dim", None) for axis, placement in enumerate(tensor.placements)}
    return {axis: dim for axis, dim in dims.items() if dim is not None}


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return where this rank's part of a DTensor lies in the whole; a plain tensor is the whole.

    Inner axes of the mesh split first: FSDP shards what tensor parallelism has left to a rank. Torch splits as
    ``torch.chunk`` does: parts of equal size, and the last may be shorter or empty.
    """
    slices = [slice(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, dim in reversed(split_axes(tensor).items()):
            slices[dim] = _chunk(slices[dim], mesh.size(axis), mesh.get_local_rank(axis))
        assert tuple(part.stop - part.start for part in slices) == tensor.to_local().shape
    return tuple(slices)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of ``tensor``, as a plain tensor that shares its memory."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _chunk(whole: slice, num_parts: int, index: int) -> slice:
    size = -(-(whole.stop - whole.start) // num_parts)
    return slice(min(whole.start + index * size, whole.stop), min(whole.start + (index + 1) * size, whole.stop))


def rank_share(items: Sequence[Item], rank: int, world_size: int) -> Sequence[Item]:
    """Return the contiguous share of ``rank`` in a list that every rank holds; shares differ by one item at most."""
    return items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size]
