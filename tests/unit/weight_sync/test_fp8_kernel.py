"""The Triton kernel against the same rounding by torch: on a GPU bit for bit, elsewhere in Triton's interpreter.

The interpreter (3.9) rounds otherwise than GPUs do: to bfloat16 towards 0, to e4m3 without carries. So without a GPU
this checks where blocks, scales and values lie, and not the last bit. Runs where Triton is installed.
"""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
pytest.importorskip("triton")
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from rlplug.weight_sync.fp8_kernel import quantize_on_gpu  # noqa: E402
from rlplug.weight_sync.fp8_quantize import quantize_blocks  # noqa: E402


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (64, 256), (192, 576), (130, 5), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_kernel_rounds_as_torch_does(shape, dtype, power_of_two, monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * torch.linspace(0, 1, shape[0])[:, None]
    expected_values, expected_scales = quantize_blocks(weight, dtype, power_of_two)
    values, scales = quantize_on_gpu(weight.to("cuda" if ON_GPU else "cpu"), dtype, power_of_two)
    is_same = values.cpu().view(torch.uint8) == expected_values.view(torch.uint8)
    if ON_GPU:
        assert is_same.all()
        assert torch.equal(scales.cpu(), expected_scales)
    else:
        assert is_same.float().mean() > 0.8
        torch.testing.assert_close(scales, expected_scales, rtol=1e-2, atol=0)
