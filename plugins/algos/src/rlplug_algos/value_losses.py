"""Losses of the critic."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    r"""Return half the squared error of each value, float [K], and where clipping stopped the gradient, bool [K].

    .. math:: L_t = \tfrac{1}{2} \max\big((V_t - R_t)^2, (\mathrm{clip}(V_t, V^{old}_t \pm c) - R_t)^2\big)

    PPO's value clipping (Engstrom et al., arXiv:2005.12729, section 3), with the factor of TRL and verl.

    Args:
        values: float [K], with gradient.
        old_values: float [K]: the values before the update.
        returns: float [K]: the targets R.
        clip: c, largest change of a value; ``None`` leaves the plain squared error.
    """
    errors = (values - returns).square()
    if clip is None:
        return errors / 2, torch.zeros_like(errors, dtype=torch.bool)
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(errors, bounded) / 2, bounded > errors
