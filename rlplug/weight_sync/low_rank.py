"""Low-rank adapters of a network: the record that the weight sync, the export and the reference policy read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlplug.distributed.mesh import local_part, local_slices

DROPPED: Final = 0xFFFF
"""Bits of a float32 that bfloat16 has not."""
TILE: Final = 1 << 16
"""Positions whose thresholds are hashed one by one; those of other tiles follow from them and a hash of the tile."""
MIX: Final = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))
"""Shifts and odd factors of the integer hash ``lowbias32``: https://github.com/skeeto/hash-prospector."""


@dataclass(frozen=True)
class LowRankUpdate:
    """The update ``scale * up @ down`` of a matrix [O, I]; LoRA, arXiv:2106.09685, equation 3."""

    down: nn.Linear
    """Layer with A of the paper, float32 [r, I], sharded or not."""
    up: nn.Linear
    """Layer with B of the paper, float32 [O, r], sharded as the matrix is."""
    scale: float
    """alpha / r."""

    def added_to(self, weight: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the matrix with its update, added in float32, in ``dtype``: each rank computes its own rows.

        In bfloat16 the sum is rounded as :func:`round_to_bfloat16` says.

        Args:
            weight: The matrix [O, I], sharded or not; unchanged.
            down: All of A, on the matrix's device.
            dtype: Dtype of the result.
        """
        rows, up = local_part(weight), local_part(self.up.weight)
        merged = torch.addmm(rows.float(), up.float(), down.float(), alpha=self.scale)
        if dtype == torch.bfloat16:
            merged = round_to_bfloat16(merged, local_slices(weight)[0].start * weight.shape[1])
        else:
            merged = merged.to(dtype)
        if not isinstance(weight, DTensor):
            return merged
        return DTensor.from_local(
            merged, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )


@dataclass(frozen=True)
class Adapters:
    """The adapters of a network whose other parameters are frozen."""

    updates: Mapping[str, LowRankUpdate]
    """Each adapted matrix's update, by the matrix's name in the network."""
    plain_names: Mapping[str, str]
    """The name that each frozen parameter has in the same network without adapters, by its name with them."""


def round_to_bfloat16(values: Tensor, first: int = 0) -> Tensor:
    """Return float32 ``values`` in bfloat16, each rounded up as often as it is near to the upper of its neighbours.

    Rounding to the nearest drops an update of less than half a step, 2^-9 of the weight, however many weights have one
    (stochastic rounding: arXiv:1502.02551). The threshold of a weight follows from its position alone: every sync of
    the same values sends the same bits, from any number of ranks. Values of bfloat16, infinities and NaN stay.

    Args:
        values: Rows of a matrix; unchanged.
        first: Position of their first element in the whole matrix.
    """
    bits = values.contiguous().view(torch.int32)
    up = _thresholds(first, bits.numel(), bits.device).view_as(bits).add_(bits).bitwise_and_(~DROPPED)
    return torch.where(values.isnan(), values, up.view(torch.float32)).to(torch.bfloat16)


def _thresholds(first: int, number: int, device: torch.device) -> Tensor:
    """Return int32 [number] between 0 and ``DROPPED``, as if drawn evenly, for positions from ``first`` on."""
    start, end = first // TILE, (first + number - 1) // TILE + 1
    in_tile = _hashes(torch.arange(TILE, dtype=torch.int32, device=device))
    of_tile = _hashes(torch.arange(TILE + start, TILE + end, dtype=torch.int32, device=device))
    return (of_tile[:, None] ^ in_tile).view(-1)[first % TILE :][:number]


def _hashes(numbers: Tensor) -> Tensor:
    """Return int32 between 0 and ``DROPPED`` for each of ``numbers``, which are overwritten."""
    for shift, factor in MIX:
        numbers.bitwise_xor_((numbers >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor)
    return numbers.bitwise_and_(DROPPED)
