"""Masked reductions: what is masked out may be anything."""

from __future__ import annotations

import numpy
import pytest
import torch

from rlplug.ops import masked_mean, masked_sum


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("seed", range(5))
def test_reductions_ignore_what_is_masked(garbage, seed):
    random = numpy.random.default_rng(seed)
    values, mask = random.normal(size=(4, 9)), random.random((4, 9)) < 0.4
    dirty = torch.from_numpy(numpy.where(mask, values, garbage))
    assert masked_sum(dirty, torch.from_numpy(mask)).item() == pytest.approx(values[mask].sum(), abs=1e-12)
    assert masked_mean(dirty, torch.from_numpy(mask)).item() == pytest.approx(values[mask].mean(), abs=1e-12)


def test_empty_mask():
    values, mask = torch.full((2, 3), float("nan")), torch.zeros(2, 3, dtype=torch.bool)
    assert masked_sum(values, mask).item() == 0.0
    assert masked_mean(values, mask).item() == 0.0


def test_what_counts_is_not_hidden():
    values = torch.tensor([1.0, float("nan")])
    assert masked_sum(values, torch.tensor([True, True])).isnan()


def test_gradient_stays_in_the_mask():
    values = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    masked_mean(values, torch.tensor([True, False, True])).backward()
    assert values.grad.tolist() == [0.5, 0.0, 0.5]
