"""Estimators of KL(policy || reference) from sampled tokens, their gradients, and a controller of the penalty.

Schulman, "Approximating KL divergence", 2020. For a token drawn from the policy, with log ratio
``d = log pi(token) - log pi_ref(token)``: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlplug_algos.policy_losses import MAX_LOG_RATIO, token_ratio

KLEstimator: TypeAlias = Literal["k1", "k2", "k3", "k3_unweighted"]
"""``k3_unweighted`` is k3 with another gradient; see :func:`kl_penalty`."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator, k3_max: float | None = None) -> Tensor:
    """Return the KL estimate of each token, in nats, float [K].

    k1 has no bias and can be negative; k2 has a bias and little variance; k3 has neither a bias nor negative values.
    ``k3_max`` is the largest value of k3; ``None`` sets no limit.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    k3 = (-difference).expm1() + difference
    return k3 if k3_max is None else k3.clamp(max=k3_max)


def kl_penalty(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: KLEstimator,
    k3_max: float | None = None,
) -> Tensor:
    r"""Return the KL penalty of each token for a loss, float [K], with the gradient of the KL divergence.

    The gradient of ``KL(pi || ref)`` is :math:`E_\pi[d\, \nabla \log\pi]`. Differentiating an estimate of its *value*
    misses that tokens are drawn from the policy itself. The remedy depends on the estimator:

    - ``k1``, ``k3``: times the ratio :math:`\rho = \pi / \pi_{old}`, whose gradient adds the missing part:
      :math:`\nabla(\rho\, k) = \rho\,(k + k')\nabla\log\pi`, and ``k + k'`` is ``d + 1`` for k1, where the 1 averages
      out, and ``d`` for k3. DeepSeek-V3.2 (arXiv:2512.02556) and TRL (``use_bias_correction_kl``) do this for k3.
    - ``k2``: unchanged, since its derivative is :math:`d\, \nabla\log\pi` already.
    - ``k3_unweighted``: k3 unchanged, as in the GRPO paper. Its gradient is not that of ``KL(pi || ref)`` but,
      on-policy, that of ``KL(ref || pi)``.

    Args:
        logprobs: float [K], with gradient: the current policy's.
        old_logprobs: float [K]: those of the policy that the tokens were drawn from.
        ref_logprobs: float [K]: the reference policy's.
        estimator: The estimator to use.
        k3_max: Largest value of k3, before the ratio; above it k3 is a constant. ``None`` sets no limit.
    """
    if estimator in ("k3", "k3_unweighted"):
        return _k3_penalty(logprobs, old_logprobs, ref_logprobs, estimator == "k3", k3_max)
    estimate = kl_estimate(logprobs, ref_logprobs, estimator)
    return estimate * token_ratio(logprobs, old_logprobs) if estimator == "k1" else estimate


def _k3_penalty(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, is_weighted: bool, k3_max: float | None
) -> Tensor:
    """Return k3, times the ratio where ``is_weighted``, with its derivative in closed form.

    Autograd would add up the terms of the derivative, which cancel: below d = -17, ``k + k'`` is the difference of two
    float32 numbers whose spacing is more than d; near 0, ``k' = 1 - exp(-d)`` is less than the spacing at 1.
    """
    with torch.no_grad():
        difference = logprobs - ref_logprobs
        value, slope = kl_estimate(logprobs, ref_logprobs, "k3"), -(-difference).expm1()
        value_and_slope = difference  # k + k' = d
        if k3_max is not None:
            is_limited, value = value > k3_max, value.clamp(max=k3_max)
            slope = slope.masked_fill(is_limited, 0.0)
            value_and_slope = difference.masked_fill(is_limited, k3_max)
        if is_weighted:
            ratio, log_ratio = token_ratio(logprobs, old_logprobs), logprobs - old_logprobs
            is_cut = log_ratio.abs() > MAX_LOG_RATIO  # there the ratio is a constant
            value, slope = ratio * value, ratio * torch.where(is_cut, slope, value_and_slope)
    return value + slope * (logprobs - logprobs.detach())


class AdaptiveKL:
    r"""Controller of a KL penalty's coefficient that keeps the divergence near a target.

    .. math:: e = \mathrm{clip}(KL / target - 1, -0.2, 0.2) \qquad \beta \leftarrow \beta (1 + e\, n / horizon)

    Ziegler et al., arXiv:1909.08593, section 2.2, where the KL is summed over a completion. Here, as in verl, it and
    the target are means per token, so that a target does not depend on the length of completions.

    Args:
        coefficient: Initial value of beta.
        target: Target divergence, in nats per token.
        horizon: Completions over which beta can change by about 20%.
    """

    def __init__(self, coefficient: float, target: float, horizon: int) -> None:
        self.coefficient = coefficient
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_completions: int) -> None:
        """Update the coefficient with ``kl``, the mean over ``num_completions`` in nats per token."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_completions / self.horizon
