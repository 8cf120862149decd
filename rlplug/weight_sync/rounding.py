"""Rounding that is right on average, so that updates smaller than half a step of bfloat16 are not lost."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

DROPPED: Final = 0xFFFF
"""Bits of a float32 that bfloat16 has not."""
TILE: Final = 1 << 16
"""Positions whose thresholds are hashed one by one; those of other tiles follow from them and a hash of the tile."""
MIX: Final = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))
"""Shifts and odd factors of the integer hash ``lowbias32``: https://github.com/skeeto/hash-prospector."""


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
