"""Buckets of bounded size with the full weights of a sharded model, for the weight sync and for export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlplug.interfaces.rollout import PolicySpec
from rlplug.interfaces.weight_sync import AdapterWeights, Bucket, FP8Weights, WeightsOfParameters
from rlplug.weight_sync.hf_names import adapter_modules, adapters_of, hf_weights, sent_dtype

if TYPE_CHECKING:
    from rlplug.weight_sync.low_rank import LowRankUpdate

ALIGNMENT: Final = 16
"""Alignment of each tensor in an all-gather, in bytes, so that it can be viewed in its own dtype."""


@torch.no_grad()
def weight_buckets(
    model: nn.Module,
    dtype: torch.dtype,
    max_bytes: int = 1 << 30,
    fp8: FP8Weights | None = None,
    weights: WeightsOfParameters | None = None,
    merges: bool = True,
) -> Iterator[Bucket]:
    """Yield every weight of ``model`` in ``dtype``, unsharded, under its name in Hugging Face checkpoints.

    Collective: every rank must exhaust the iterator, since sharded parameters are gathered when their turn comes. Tied
    parameters are sent once, under the name that comes first. A bucket holds at most ``max_bytes``, unless it is a
    single parameter; making it takes its bytes twice. It shares no memory with the model.

    Args:
        model: The model, sharded in any way or not.
        dtype: Dtype of the weights that are not quantised.
        max_bytes: Largest size of a bucket as it is sent, in bytes.
        fp8: The weights that are sent in FP8, each as two tensors, values and scales, side by side. Shards of whole
            blocks are quantised before they are gathered; the result does not depend on that.
        weights: Checkpoint weights that each parameter becomes; by default those of a transformers model.
        merges: Whether what low-rank adapters add is merged on the way; otherwise they are left out.
    """
    in_fp8 = frozenset(fp8.quantized) if fp8 is not None else frozenset()
    of_parameters = hf_weights(model) if weights is None else weights
    adapters = adapters_of(model)
    updates = adapters.updates if adapters is not None and merges else {}
    gatherer = _WeightGatherer(of_parameters, dtype, in_fp8, fp8 is not None and fp8.power_of_two_scales, updates)
    sent = [(name, parameter.detach()) for name, parameter in model.named_parameters() if of_parameters[name]]
    for group in _grouped(sent, lambda name, _: gatherer.num_bytes(name), max_bytes):
        yield gatherer.gather(group)


@torch.no_grad()
def adapter_buckets(model: nn.Module, adapters: AdapterWeights, dtype: torch.dtype, max_bytes: int) -> Iterator[Bucket]:
    """Yield the low-rank adapters of ``model`` in ``dtype``, unsharded, under their names in ``adapters``.

    Collective, and sharing no memory with the model, as :func:`weight_buckets`.
    """
    updates, modules = adapters_of(model), adapter_modules(model)
    assert updates is not None
    assert tuple(modules.values()) == adapters.modules, "the engine was told of other adapters"
    sent = [
        (sent_name, layer.weight.detach())
        for name, module in modules.items()
        for sent_name, layer in zip(
            AdapterWeights.names(module), (updates.updates[name].down, updates.updates[name].up), strict=True
        )
    ]
    for group in _grouped(sent, lambda _, tensor: tensor.numel() * dtype.itemsize, max_bytes):
        own = {_storage_of(tensor) for _, tensor in group}
        full = _gather_full(group, dtype, partial(_part_in, dtype))
        yield [(name, _apart(tensor.to(dtype), own)) for name, tensor in full.items()]


def policy_buckets(
    policy: nn.Module,
    spec: PolicySpec,
    max_bytes: int,
    weights: WeightsOfParameters | None = None,
    has_frozen: bool = False,
) -> Iterator[Bucket]:
    """Return the weights of ``policy`` as an engine of ``spec`` gets them. Collective.

    Args:
        policy: The policy, sharded or not.
        spec: What the engine was told.
        max_bytes: Largest size of a bucket, in bytes.
        weights: As for :func:`weight_buckets`.
        has_frozen: Whether an engine that serves adapters has the frozen weights, and gets the adapters alone.

    Raises:
        RunError: A weight is NaN or infinite and FP8 cannot represent it.
    """
    if spec.fp8 is not None:
        from rlplug.weight_sync.fp8_layers import check_finite

        check_finite(policy, spec.dtype, spec.fp8, weights)
    if spec.adapters is None:
        return weight_buckets(policy, spec.dtype, max_bytes, spec.fp8, weights)
    frozen = iter(()) if has_frozen else weight_buckets(policy, spec.dtype, max_bytes, None, weights, merges=False)
    return chain(frozen, adapter_buckets(policy, spec.adapters, spec.dtype, max_bytes))


def drain(buckets: Iterator[Bucket]) -> None:
    """Exhaust ``buckets`` and drop what they hold, after a fault ended the use of them on this rank.

    Each bucket is a collective operation: ranks whose engine still takes the weights would wait for this one for ever.
    """
    for _ in buckets:
        pass


def _grouped(
    named: Iterable[tuple[str, Tensor]], num_bytes_of: Callable[[str, Tensor], int], max_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors in groups of at most ``max_bytes``, or of a single tensor that is larger."""
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        num_bytes = num_bytes_of(name, tensor)
        if pending and size + num_bytes > max_bytes:
            yield pending
            pending, size = [], 0
        pending.append((name, tensor))
        size += num_bytes
    if pending:
        yield pending


@dataclass(frozen=True)
class _Part:
    """This rank's part of a tensor whose rows are sharded.

    Rank r holds rows r * c to (r + 1) * c, as far as the tensor has them, with c rounded up: the ranks' parts one after
    another, cut at the end, are the tensor.
    """

    local: Tensor
    """This rank's rows, in any floating dtype."""
    shape: torch.Size
    """Shape of the whole tensor."""
    num_rows: int
    """c, the number of rows of each rank, padding of the last ranks included."""
    dtype: torch.dtype
    """Dtype in which the part is sent."""

    @property
    def span(self) -> int:
        """Bytes of each rank's part, padding included."""
        return self.num_rows * self.shape[1:].numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _WeightGatherer:
    """Gathers, casts and quantises the weights of one sync."""

    weights: WeightsOfParameters
    """Weights of a checkpoint that each parameter becomes, by the parameter's name."""
    dtype: torch.dtype
    """Dtype of weights that are not quantised."""
    in_fp8: frozenset[str]
    """Checkpoint names of the weights that are sent in FP8."""
    power_of_two_scales: bool
    """Whether scales are rounded up to powers of two."""
    updates: Mapping[str, LowRankUpdate]
    """Low-rank updates, by the parameter to which each is added."""

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a parameter as it is sent."""
        return sum(
            weight.shape.numel() + FP8Weights.scale_shape(weight.shape).numel() * torch.float32.itemsize
            if weight.name in self.in_fp8
            else weight.shape.numel() * sent_dtype(weight.name, self.dtype).itemsize
            for weight in self.weights[name]
        )

    def gather(self, named: Sequence[tuple[str, Tensor]]) -> Bucket:
        """Return full tensors, merged with their low-rank updates; none shares memory with the policy.

        An engine may keep or change what it gets.
        """
        full = _gather_full(self._merged(named), self.dtype, self._parts)
        own = {_storage_of(tensor) for _, tensor in named}
        return [
            (weight_name, _apart(tensor, own))
            for name, _ in named
            for weight_name, tensor in self._checkpoint_weights(name, full)
        ]

    def _merged(self, named: Sequence[tuple[str, Tensor]]) -> Sequence[tuple[str, Tensor]]:
        """Add the low-rank updates: each rank computes its own rows of B A, so A alone is gathered."""
        downs = [(name, self.updates[name].down.weight.detach()) for name, _ in named if name in self.updates]
        if not downs:
            return named
        whole = _gather_full(downs, torch.float32, partial(_part_in, torch.float32))
        dtype = torch.float32 if self.in_fp8 else self.dtype
        return [
            (name, self.updates[name].added_to(tensor, whole[name], dtype) if name in whole else tensor)
            for name, tensor in named
        ]

    def _parts(self, name: str, tensor: DTensor, num_ranks: int) -> dict[str, _Part]:
        local, num_rows = tensor.to_local(), -(-tensor.shape[0] // num_ranks)
        matrix_rows = num_rows * tensor.shape[1:-1].numel()  # with the matrices of all its experts stacked
        if matrix_rows % FP8Weights.BLOCK or not self._is_quantised_whole(name):
            return {name: _Part(local, tensor.shape, num_rows, sent_dtype(name, self.dtype))}
        from rlplug.weight_sync.fp8_quantize import quantize_blocks

        values, scales = quantize_blocks(local.flatten(0, -2), self.dtype, self.power_of_two_scales)
        scale_shape = FP8Weights.scale_shape(torch.Size((tensor.shape[:-1].numel(), tensor.shape[-1])))
        return {
            name: _Part(values.view(local.shape), tensor.shape, num_rows, values.dtype),
            FP8Weights.scale_name(name): _Part(scales, scale_shape, matrix_rows // FP8Weights.BLOCK, scales.dtype),
        }

    def _is_quantised_whole(self, name: str) -> bool:
        """Return whether all of a parameter is sent in FP8, unconverted, and none of its blocks spans two weights."""
        return all(
            weight.name in self.in_fp8
            and weight.convert is None
            and (weight.first_row is None or weight.num_rows % FP8Weights.BLOCK == 0)
            for weight in self.weights[name]
        )

    def _checkpoint_weights(self, name: str, full: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint weights of a full parameter, quantised now unless its shards were."""
        scales_of_all = full.get(FP8Weights.scale_name(name))
        for weight in self.weights[name]:
            tensor = weight.of(full[name])
            if weight.name not in self.in_fp8:
                yield weight.name, tensor.to(sent_dtype(weight.name, self.dtype))
                continue
            if scales_of_all is None:
                from rlplug.weight_sync.fp8_quantize import quantize_blocks

                values, scales = quantize_blocks(tensor, self.dtype, self.power_of_two_scales)
            else:
                values, scales = tensor, weight.scales_of(scales_of_all, FP8Weights.BLOCK)
            yield weight.name, values
            yield FP8Weights.scale_name(weight.name), scales


def _storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, of the shard that this rank has of a sharded one."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _apart(tensor: Tensor, storages: set[int]) -> Tensor:
    """Return a tensor that lies in none of some memories: itself, or a copy."""
    return tensor.clone() if _storage_of(tensor) in storages else tensor


def _axis_of_rows(tensor: DTensor) -> int | None:
    """Return the mesh axis that shards the rows of ``tensor``, or ``None`` if it is sharded in another way."""
    sharded = [axis for axis, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    placement: Any = tensor.placements[sharded[0]] if len(sharded) == 1 else None
    return sharded[0] if type(placement) is Shard and placement.dim == 0 else None


def _part_in(dtype: torch.dtype, name: str, tensor: DTensor, num_ranks: int) -> dict[str, _Part]:
    return {name: _Part(tensor.to_local(), tensor.shape, -(-tensor.shape[0] // num_ranks), dtype)}


def _gather_full(
    named: Sequence[tuple[str, Tensor]],
    dtype: torch.dtype,
    parts_of: Callable[[str, DTensor, int], Mapping[str, _Part]],
) -> dict[str, Tensor]:
    """Return full tensors; the shards of all are gathered in one collective for each process group.

    ``parts_of`` returns what this rank sends of a tensor whose rows are sharded over so many ranks; others are gathered
    in ``dtype``.
    """
    full: dict[str, Tensor] = {}
    together: dict[dist.ProcessGroup, dict[str, _Part]] = {}
    for name, tensor in named:
        if not isinstance(tensor, DTensor):
            full[name] = tensor
        elif tensor.device_mesh.size() == 1:
            full[name] = tensor.to_local()
        elif (axis := _axis_of_rows(tensor)) is not None:
            group = tensor.device_mesh.get_group(axis)
            together.setdefault(group, {}).update(parts_of(name, tensor, dist.get_world_size(group)))
        else:
            narrow: Any = tensor.to(dtype)  # cast before the gather: half the bytes are sent
            full[name] = narrow.full_tensor()
    for group, parts in together.items():
        full |= _gather_rows(parts, group)
    return full


def _gather_rows(parts: Mapping[str, _Part], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """All-gather tensors whose rows are sharded over ``group``, in one collective operation."""
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
    """Return the full tensor from ``column``, uint8 [ranks, bytes], whose rows are the ranks' parts."""
    return column.reshape(-1)[: part.shape.numel() * part.dtype.itemsize].view(part.dtype).view(part.shape)
