"""Losses of the policy for each token, before weighting and aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rlplug.types import Batch


@dataclass(frozen=True)
class PolicyTerm:
    """Policy loss and ratio of each token, all [K]."""

    loss: Tensor
    """float, with gradient"""
    ratio: Tensor
    """float: policy / old policy"""
    clipped_low: Tensor
    """bool: the ratio is below its limit, which stops the gradient"""
    clipped_high: Tensor
    """bool: the ratio is above its limit, which stops the gradient"""


MAX_LOG_RATIO: Final = 20.0
"""Largest absolute log ratio, in nats; larger ones are clamped, as in verl, and get no gradient. Past 88 a float32
ratio is infinite, and even a clipped token would get the gradient 0 * inf."""


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return pi / pi_old of each token, float [K]."""
    return _ratio(logprobs - old_logprobs)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, batch: Batch, length_normalized: bool) -> Tensor:
    r"""Return the ratio of each whole sequence, on every one of its tokens: float [K].

    .. math:: s = \exp\Big(\frac{1}{|y|} \sum_t (\log\pi_t - \log\pi^{old}_t)\Big)

    Equation 7 of GSPO (arXiv:2507.18071); without ``length_normalized`` the factor ``1 / |y|`` is left out.
    """
    difference = batch.sums(logprobs - old_logprobs)
    if length_normalized:
        difference = difference / batch.num_tokens.clamp(min=1)
    return batch.spread(_ratio(difference))


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_dual: float | None = None
) -> PolicyTerm:
    r"""Return PPO's clipped surrogate loss.

    .. math:: L_t = -\min(\rho_t A_t, \mathrm{clip}(\rho_t, 1 - c_{low}, 1 + c_{high}) A_t)

    Equation 7 of arXiv:1707.06347, with one bound per side as in DAPO (arXiv:2503.14476). ``clip_dual`` c also bounds
    the loss of a token that should become less likely, :math:`L_t \le -c A_t` for :math:`A_t < 0` (arXiv:1912.09729,
    equation 5).

    Args:
        ratio: float [K], with gradient.
        advantages: float [K].
        clip_low: Largest distance of the ratio below 1.
        clip_high: Largest distance of the ratio above 1.
        clip_dual: c, more than 1; ``None`` sets no bound.
    """
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    is_high = (advantages > 0) & (ratio > 1 + clip_high)
    if clip_dual is not None:
        bounded = torch.maximum(objective, clip_dual * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
        is_high = is_high | ((advantages < 0) & (ratio > clip_dual))
    return PolicyTerm(-objective, ratio.detach(), (advantages < 0) & (ratio < 1 - clip_low), is_high)


def cispo_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, ratio_min: float, ratio_max: float) -> PolicyTerm:
    r"""Return CISPO's loss: the ratio is a bounded weight, and every token keeps its gradient.

    .. math:: L_t = -\mathrm{sg}[\mathrm{clip}(\rho_t, \rho_{min}, \rho_{max})]\, A_t \log\pi_t

    Equations 4 and 5 of MiniMax-M1 (arXiv:2506.13585), whose 1 + epsilon_high is ``ratio_max``. TRL's
    ``epsilon_high`` is ``ratio_max`` too.
    """
    ratio = ratio.detach()
    loss = -ratio.clamp(ratio_min, ratio_max) * advantages * logprobs
    return PolicyTerm(loss, ratio, ratio < ratio_min, ratio > ratio_max)
