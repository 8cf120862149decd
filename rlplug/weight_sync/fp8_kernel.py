"""Triton kernel of :mod:`rlplug.weight_sync.fp8_quantize`: one pass over the weight, one program per block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlplug.interfaces.weight_sync import FP8Weights

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def quantize_on_gpu(weight: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return the same as ``quantize_blocks``, bit for bit except for subnormal numbers."""
    rows, columns = weight.shape
    assert weight.stride(1) == 1 or columns == 1
    values = torch.empty(weight.shape, dtype=FP8Weights.DTYPE, device=weight.device)
    scales = torch.empty(FP8Weights.scale_shape(weight.shape), dtype=torch.float32, device=weight.device)
    if weight.numel():
        with torch.cuda.device(weight.device):
            _quantize_block[tuple(scales.shape)](
                weight,
                values,
                scales,
                rows,
                columns,
                weight.stride(0),
                ROUNDED=TRITON_DTYPES[dtype],
                POWER_OF_TWO=power_of_two,
                BLOCK=FP8Weights.BLOCK,
                num_warps=8,
            )
    return values, scales


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _quantize_block(  # type: ignore[no-untyped-def]  # Triton reads no annotations
    weight,
    values,
    scales,
    num_rows,
    num_columns,
    row_stride,
    ROUNDED: tl.constexpr,  # noqa: N803
    POWER_OF_TWO: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows) & (columns < num_columns)
    block = tl.load(weight + rows.to(tl.int64) * row_stride + columns, mask=inside, other=0.0)
    block = block.to(ROUNDED).to(tl.float32)
    largest = tl.max(tl.abs(block))
    scale = tl.maximum(tl.div_rn(largest, 448.0), 1.1754943508222875e-38)
    if POWER_OF_TWO:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(largest == 0.0, 1.0, scale)
    rounded = (block * tl.div_rn(1.0, scale)).to(tl.float8e4nv)
    tl.store(values + rows.to(tl.int64) * num_columns + columns, rounded, mask=inside)
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)
