"""Reductions under a mask."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum ``values`` where ``mask`` is true. What is masked out may be NaN or infinite."""
    return torch.where(mask, values, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` where ``mask`` is true; 0 for an empty mask."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)
