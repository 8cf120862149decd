"""Walks a sharded model and yields its full weights in buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlplug.interfaces.weight_sync import Bucket, FP8Weights
from rlplug.weight_sync.fp8_quantize import quantize_blocks
from rlplug.weight_sync.hf_names import HFWeight, hf_weights

ALIGNMENT: Final = 16
"""Bytes to a multiple of which each tensor of a gather begins, so that it can be read in its own dtype."""


@torch.no_grad()
def weight_buckets(
    model: nn.Module, dtype: torch.dtype, max_bytes: int = 1 << 30, fp8: FP8Weights | None = None
) -> Iterator[Bucket]:
    """Yield every weight of ``model`` in ``dtype``, unsharded, under the name that it has in a checkpoint of the hub.

    Collective: every rank must exhaust the iterator, since sharded parameters are gathered when their turn comes. Tied
    parameters travel once, under the name that comes first. A bucket holds at most ``max_bytes``, unless it is a single
    parameter; while it is made, its bytes are there twice.

    Args:
        model: Sharded in any way, or not.
        dtype: Of the weights that are not quantised.
        max_bytes: As they travel.
        fp8: Which travel as two tensors, values and their scales, side by side. Shards of whole blocks are quantised
            where they are, before they are gathered; the result does not depend on that.
    """
    in_fp8 = frozenset(fp8.quantized) if fp8 is not None else frozenset()
    gatherer = _WeightGatherer(hf_weights(model), dtype, in_fp8, fp8 is not None and fp8.power_of_two_scales)
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, parameter in model.named_parameters():
        num_bytes = gatherer.num_bytes(name)
        if pending and size + num_bytes > max_bytes:
            yield gatherer.gather(pending)
            pending, size = [], 0
        pending.append((name, parameter.detach()))
        size += num_bytes
    if pending:
        yield gatherer.gather(pending)


def drain(buckets: Iterator[Bucket]) -> None:
    """Exhaust ``buckets`` and drop what they hold, after a fault ended the use of them on this rank.

    Each bucket is a collective operation: ranks whose engine still takes the weights would wait for this one for ever.
    """
    for _ in buckets:
        pass


@dataclass(frozen=True)
class _Part:
    """What a rank has of a tensor whose rows are distributed.

    Rank r holds rows r * c to (r + 1) * c of it, as far as it has them, with c rounded up: behind each other, and cut
    at the end, the ranks' parts are the tensor.
    """

    local: Tensor
    shape: torch.Size
    """Of the tensor."""
    rows: int
    """c"""
    dtype: torch.dtype
    """In which it travels."""

    @property
    def span(self) -> int:
        """Bytes of each rank's part, those that are missing at the end included."""
        return self.rows * self.shape[1:].numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _WeightGatherer:
    """How the weights of one sync travel."""

    weights: Mapping[str, Sequence[HFWeight]]
    """What travels of each parameter."""
    dtype: torch.dtype
    in_fp8: frozenset[str]
    power_of_two_scales: bool

    def num_bytes(self, name: str) -> int:
        return sum(
            weight.shape.numel() + FP8Weights.scale_shape(weight.shape).numel() * torch.float32.itemsize
            if weight.name in self.in_fp8
            else weight.shape.numel() * self.dtype.itemsize
            for weight in self.weights[name]
        )

    def gather(self, named: Sequence[tuple[str, Tensor]]) -> Bucket:
        """Return full tensors; those that FSDP shards cross the links together, once for each process group."""
        full: dict[str, Tensor] = {}
        together: dict[dist.ProcessGroup, dict[str, _Part]] = {}
        for name, tensor in named:
            if not isinstance(tensor, DTensor):
                full[name] = tensor
            elif tensor.device_mesh.size() == 1:
                full[name] = tensor.to_local()
            elif (axis := _rows_axis(tensor)) is not None:
                group = tensor.device_mesh.get_group(axis)
                together.setdefault(group, {}).update(self._parts(name, tensor, dist.get_world_size(group)))
            else:
                narrow: Any = tensor.to(self.dtype)  # first: half the bytes travel
                full[name] = narrow.full_tensor()
        for group, parts in together.items():
            full |= _gather_rows(parts, group)
        return [pair for name, _ in named for pair in self._finished(name, full)]

    def _parts(self, name: str, tensor: DTensor, num_ranks: int) -> dict[str, _Part]:
        local, rows = tensor.to_local(), -(-tensor.shape[0] // num_ranks)
        matrix_rows = rows * tensor.shape[1:-1].numel()  # with the matrices of all its experts below each other
        if matrix_rows % FP8Weights.BLOCK or not self._is_quantised_whole(name):
            return {name: _Part(local, tensor.shape, rows, self.dtype)}
        values, scales = quantize_blocks(local.flatten(0, -2), self.dtype, self.power_of_two_scales)
        scale_shape = FP8Weights.scale_shape(torch.Size((tensor.shape[:-1].numel(), tensor.shape[-1])))
        return {
            name: _Part(values.view(local.shape), tensor.shape, rows, values.dtype),
            FP8Weights.scale_name(name): _Part(scales, scale_shape, matrix_rows // FP8Weights.BLOCK, scales.dtype),
        }

    def _is_quantised_whole(self, name: str) -> bool:
        """Whether all of a parameter travels in FP8, and no block of it is of two weights."""
        return all(
            weight.name in self.in_fp8 and (weight.first_row is None or weight.num_rows % FP8Weights.BLOCK == 0)
            for weight in self.weights[name]
        )

    def _finished(self, name: str, full: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield what travels of a parameter: quantised now, where it could not be before."""
        scales_of_all = full.get(FP8Weights.scale_name(name))
        for weight in self.weights[name]:
            tensor = weight.of(full[name])
            if weight.name not in self.in_fp8:
                yield weight.name, tensor.to(self.dtype)
                continue
            if scales_of_all is None:
                values, scales = quantize_blocks(tensor, self.dtype, self.power_of_two_scales)
            else:
                values, scales = tensor, weight.scales_of(scales_of_all, FP8Weights.BLOCK)
            yield weight.name, values
            yield FP8Weights.scale_name(weight.name), scales


def _rows_axis(tensor: DTensor) -> int | None:
    """Return the axis of the mesh over which rows are sharded, if that is all that is done to the tensor."""
    sharded = [axis for axis, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    if len(sharded) != 1:
        return None
    (axis,) = sharded
    placement = tensor.placements[axis]
    return axis if type(placement) is Shard and placement.dim == 0 else None


def _gather_rows(parts: Mapping[str, _Part], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """All-gather tensors whose rows are distributed over ``group``, in one collective operation."""
    size = dist.get_world_size(group)
    spans = [-(-part.span // ALIGNMENT) * ALIGNMENT for part in parts.values()]
    device = next(iter(parts.values())).local.device
    mine = torch.empty(sum(spans), dtype=torch.uint8, device=device)
    for part, place in zip(parts.values(), torch.split(mine, spans), strict=True):
        if part.local.numel():
            place[: part.local.numel() * part.dtype.itemsize].view(part.dtype).view(part.local.shape).copy_(part.local)
    everyone = torch.empty(size * len(mine), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(everyone, mine, group=group)
    columns = torch.split(everyone.view(size, -1), spans, dim=1)
    return {
        name: _joined(column[:, : part.span], part) for (name, part), column in zip(parts.items(), columns, strict=True)
    }


def _joined(column: Tensor, part: _Part) -> Tensor:
    """Return the tensor of which each row of ``column``, uint8 [ranks, bytes], is one rank's part."""
    num_bytes = part.shape.numel() * part.dtype.itemsize
    return column.reshape(-1)[:num_bytes].view(part.dtype).view(part.shape)
