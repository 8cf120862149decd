"""FP8 rounding, against e4m3 as its definition has it, in numpy."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from rlplug.weight_sync.fp8_quantize import dequantize_blocks, next_power_of_two, quantize_blocks

SHAPES = [(128, 128), (256, 384), (64, 256), (192, 576), (130, 5), (1, 1), (300, 129)]


def e4m3_numbers() -> numpy.ndarray:
    """All finite, not negative numbers of e4m3, in order: 4 bits of exponent with bias 7, and 3 of mantissa."""
    numbers = [
        (bits & 7) * 2.0**-9 if bits >> 3 == 0 else (1 + (bits & 7) / 8) * 2.0 ** ((bits >> 3) - 7)
        for bits in range(127)
    ]
    return numpy.array(numbers)


def nearest(values: numpy.ndarray) -> numpy.ndarray:
    """The nearest of these numbers to each value, and of two that are as near the even one."""
    numbers = e4m3_numbers()
    above = numpy.searchsorted(numbers, values).clip(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    to_high = (values - low > high - values) | ((values - low == high - values) & (above % 2 == 0))
    return numpy.where(to_high, high, low)


def reference(weight: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Values and scales of a float32 weight, block after block, with float32 scales."""
    rows, columns = weight.shape
    values, scales = numpy.zeros_like(weight), numpy.ones((math.ceil(rows / 128), math.ceil(columns / 128)), "f4")
    for row, column in numpy.ndindex(*scales.shape):
        place = numpy.s_[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
        largest = numpy.abs(weight[place]).max()
        if largest:
            scales[row, column] = largest / numpy.float32(448)
        scaled = weight[place] * (numpy.float32(1) / scales[row, column])
        values[place] = numpy.sign(scaled) * nearest(numpy.abs(scaled))
    return values, scales


def weight_of(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Rows and columns of very different sizes, so that a block in another's place has another scale."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(shape[0], 1, generator=generator) * torch.rand(1, shape[1], generator=generator)
    return torch.randn(shape, generator=generator) * sizes.pow(3)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_scales_are_those_of_the_definition(shape):
    weight = weight_of(shape).to(torch.bfloat16).float()
    values, scales = quantize_blocks(weight, torch.bfloat16)
    expected_values, expected_scales = reference(weight.numpy())
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    numpy.testing.assert_array_equal(scales.numpy(), expected_scales)
    numpy.testing.assert_array_equal(values.float().numpy(), expected_values)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_comes_back_is_near_the_weight(shape, power_of_two):
    """A normal number of e4m3 is within 1/16 of what it stands for, a smaller one within half a step of 2^-9."""
    weight = weight_of(shape)
    values, scales = quantize_blocks(weight, torch.float32, power_of_two)
    back = dequantize_blocks(values, scales, torch.float32)
    each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert ((back - weight).abs() <= (weight.abs() / 16).maximum(each * 2**-10) * 1.0001).all()


def test_the_dtype_that_an_optimizer_keeps_changes_nothing():
    weight = weight_of((256, 256))
    values, scales = quantize_blocks(weight, torch.bfloat16)
    rounded_values, rounded_scales = quantize_blocks(weight.to(torch.bfloat16), torch.bfloat16)
    assert torch.equal(values.view(torch.uint8), rounded_values.view(torch.uint8))
    assert torch.equal(scales, rounded_scales)
    assert not torch.equal(scales, quantize_blocks(weight, torch.float32)[1])


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_block_of_zeros_has_scale_one(power_of_two):
    weight = torch.zeros(128, 256)
    weight[5, 200] = 3.0
    values, scales = quantize_blocks(weight, torch.bfloat16, power_of_two)
    assert scales[0, 0] == 1
    assert torch.equal(dequantize_blocks(values, scales, torch.float32), weight)


@pytest.mark.parametrize("size", [3e38, 1e-30, 1.2e-38, 1e-40])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_huge_and_tiny_blocks(size, power_of_two):
    """The smallest lie below the least normal number: they come back to its 512th part."""
    weight = torch.linspace(-1, 1, 128 * 128).view(128, 128) * size
    values, scales = quantize_blocks(weight, torch.float32, power_of_two)
    back = dequantize_blocks(values, scales, torch.float32)
    assert scales.isfinite().all()
    assert scales.gt(0).all()
    error = (back.double() - weight.double()).abs().max().item()
    assert error <= max(size / 16, 2**-126 / 512)


def test_a_huge_block_does_not_reach_its_neighbours():
    weight = weight_of((256, 256))
    alone, _ = quantize_blocks(weight, torch.float32)
    weight[:128, :128] *= 1e30
    beside, scales = quantize_blocks(weight, torch.float32)
    assert torch.equal(beside[128:].view(torch.uint8), alone[128:].view(torch.uint8))
    assert torch.equal(beside[:, 128:].view(torch.uint8), alone[:, 128:].view(torch.uint8))
    assert scales[0, 0] > 1e20 * scales[0, 1]


def test_scales_that_are_powers_of_two():
    _, exact = quantize_blocks(weight_of((384, 384)), torch.float32)
    _, scales = quantize_blocks(weight_of((384, 384)), torch.float32, power_of_two=True)
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all()
    assert ((scales >= exact) & (scales < 2 * exact)).all()


def test_the_next_power_of_two():
    numbers = torch.tensor([2.0**-126, 0.5, 0.5000001, 0.75, 1.0, 1.5, 3.0, 4.0])
    assert next_power_of_two(numbers).tolist() == [2.0**-126, 0.5, 1.0, 1.0, 1.0, 2.0, 4.0, 4.0]


def test_strides_change_nothing():
    """What is quantised is a weight as it stands, whatever its strides."""
    weight = weight_of((256, 128))
    values, scales = quantize_blocks(weight.T.contiguous().T, torch.float32)
    expected_values, expected_scales = quantize_blocks(weight, torch.float32)
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
