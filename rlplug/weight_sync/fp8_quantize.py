"""Quantisation of weights to FP8 (e4m3) with a scale for each block of 128 x 128, and dequantisation."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from rlplug.interfaces.weight_sync import FP8Weights

BLOCK: Final = FP8Weights.BLOCK
"""Rows, and columns, of a block."""

LARGEST: Final = torch.finfo(FP8Weights.DTYPE).max
"""Largest value of e4m3, 448."""

LEAST_SCALE: Final = torch.finfo(torch.float32).tiny
"""Smallest normal float32, 2^-126: dividing by less would overflow. A block that small rounds to a few values."""


@torch.no_grad()
def quantize_blocks(weight: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise a weight to FP8, block by block.

    A block's scale is its largest absolute value over 448, or the next power of two; 1 where all values are 0. The
    weight is rounded to ``dtype`` first, so that the result does not depend on the dtype in which an optimizer keeps
    it.

    Args:
        weight: Floating point [O, I], finite, with contiguous rows.
        dtype: Dtype of the policy.
        power_of_two: Round scales up to powers of two.

    Returns:
        Values, float8_e4m3fn [O, I], and scales, float32 [ceil(O / 128), ceil(I / 128)]; the weight is about values
        times their block's scale.
    """
    if weight.is_cuda:
        from rlplug.weight_sync.fp8_kernel import quantize_on_gpu

        return quantize_on_gpu(weight, dtype, power_of_two)
    return quantize_by_torch(weight, dtype, power_of_two)


def quantize_by_torch(weight: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Return the same as :func:`quantize_blocks`, on any device, with a copy of the weight in float32."""
    blocks = _blocks_of(weight.to(dtype).float())
    largest = blocks.abs().amax(dim=(1, 3))
    scales = (largest / LARGEST).clamp(min=LEAST_SCALE)
    if power_of_two:
        scales = next_power_of_two(scales)
    scales = torch.where(largest == 0, 1.0, scales)
    scaled = blocks * scales.reciprocal()[:, None, :, None]
    rows, columns = weight.shape
    values = scaled.flatten(2).flatten(0, 1)[:rows, :columns].to(FP8Weights.DTYPE)
    return values.contiguous(), scales


def next_power_of_two(numbers: Tensor) -> Tensor:
    """Return ``numbers``, positive normal float32, rounded up to powers of two by arithmetic on their bits."""
    return ((numbers.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


@torch.no_grad()
def dequantize_blocks(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [O, I] in ``dtype`` from quantised values and scales: values times their block's scale."""
    rows, columns = values.shape
    weight = _blocks_of(values.float()) * scales[:, None, :, None]
    return weight.flatten(2).flatten(0, 1)[:rows, :columns].to(dtype)


def _blocks_of(weight: Tensor) -> Tensor:
    """Return ``weight`` [O, I] as blocks [O', 128, I', 128], padded with zeros."""
    rows, columns = weight.shape
    padded = nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.view(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
