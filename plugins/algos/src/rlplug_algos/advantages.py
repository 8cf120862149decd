"""Advantage estimators: functions of the rewards and values of a step. B sequences of this rank, T tokens.

``mask`` is ``batch.response_mask`` and ``valid`` is ``batch.reward_valid``. Values outside of them are ignored, and
results are 0 there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlplug.types import ONE_RANK, Moments, StepStatistics


@dataclass(frozen=True)
class _Groups:
    """Sums of the valid rewards of each prompt's group. G groups."""

    of_row: Tensor
    """int64 [B]: number of a row's group, from 0"""
    size: Tensor
    """float [G]: number of valid rewards"""
    total: Tensor
    """float [G]: sum of valid rewards"""
    has_signal: Tensor
    """bool [G]: at least two valid rewards, not all equal"""

    @staticmethod
    def of(rewards: Tensor, valid: Tensor, group_index: Tensor) -> _Groups:
        of_row = torch.unique(group_index, return_inverse=True)[1]
        num_groups = int(of_row.max()) + 1 if len(of_row) else 0
        zeros, of_valid = rewards.new_zeros(num_groups), of_row[valid]
        size = zeros.index_add(0, of_valid, torch.ones_like(rewards[valid]))
        total = zeros.index_add(0, of_valid, rewards[valid])
        largest = zeros.scatter_reduce(0, of_valid, rewards[valid], "amax", include_self=False)
        smallest = zeros.scatter_reduce(0, of_valid, rewards[valid], "amin", include_self=False)
        return _Groups(of_row, size, total, largest > smallest)


def group_relative(
    rewards: Tensor, valid: Tensor, group_index: Tensor, normalize_std: bool = True, epsilon: float = 1e-4
) -> Tensor:
    r"""Return each reward relative to its group, float [B].

    .. math:: A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + \epsilon}

    This is section 4.1.2 of arXiv:2402.03300; without the division it is Dr.GRPO's advantage (arXiv:2503.20783). Mean
    and standard deviation, the unbiased one as in TRL and verl, are over the group's valid rewards. A row without a
    reward gets 0, and so does a group without a signal: fewer than two rewards, or all of them equal.

    Args:
        rewards: float [B].
        valid: bool [B]: rows that have a reward.
        group_index: int64 [B]: equal for completions of one prompt.
        normalize_std: Divide by the standard deviation.
        epsilon: Added to it.
    """
    groups = _Groups.of(rewards, valid, group_index)
    mean = groups.total / groups.size.clamp(min=1)
    centred = torch.where(valid, rewards - mean[groups.of_row], 0.0)
    if normalize_std:
        squares = torch.zeros_like(mean).index_add(0, groups.of_row, centred.square())
        std = (squares / (groups.size - 1).clamp(min=1)).sqrt()
        centred = centred / (std[groups.of_row] + epsilon)
    return torch.where(valid & groups.has_signal[groups.of_row], centred, 0.0)


def leave_one_out(rewards: Tensor, valid: Tensor, group_index: Tensor) -> Tensor:
    r"""Return each reward minus the mean of the *other* valid rewards of its group, float [B].

    .. math:: A_i = r_i - \frac{1}{k - 1} \sum_{j \ne i} r_j

    See section 2 of arXiv:2402.14740 (Kool et al., 2019). A row without a reward, or without a valid sibling, gets 0.
    """
    groups = _Groups.of(rewards, valid, group_index)
    size, total = groups.size[groups.of_row], groups.total[groups.of_row]
    baseline = (total - rewards) / (size - 1).clamp(min=1)
    return torch.where(valid & (size > 1), rewards - baseline, 0.0)


def degenerate_share(rewards: Tensor, valid: Tensor, group_index: Tensor, step: StepStatistics = ONE_RANK) -> float:
    """Return the share of the step's groups without a signal: fewer than two valid rewards, or all of them equal."""
    has_signal = _Groups.of(rewards, valid, group_index).has_signal
    return step.mean((~has_signal).double())


def token_rewards(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, coefficient: float = 0.0) -> Tensor:
    """Return token rewards, float [B, T]: the sequence's on its last trainable token, minus ``coefficient * kl``.

    The penalty counts on every trainable token, as in InstructGPT (arXiv:2203.02155, equation 2).
    """
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    per_token = torch.where(is_last, rewards[:, None], 0.0)
    return per_token if kl is None else torch.where(mask, per_token - coefficient * kl, 0.0)


def generalized_advantages(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    r"""Return generalised advantage estimates, float [B, T].

    .. math::
        \delta_t = r_t + \gamma V(s_{t+1}) - V(s_t) \qquad A_t = \delta_t + \gamma \lambda A_{t+1}

    This is equation 16 of arXiv:1506.02438. Tokens of the environment, between two turns of the policy, are no steps:
    the next trainable token follows directly. After the last one the value is 0, also for a truncated completion.

    Args:
        token_rewards: float [B, T].
        values: float [B, T]: V of the state before each token.
        mask: bool [B, T].
        gamma: Discount per token.
        lam: lambda: one number for all sequences, or one per sequence [B].
    """
    advantages = torch.zeros_like(token_rewards)
    next_value = next_advantage = torch.zeros_like(token_rewards[:, 0])
    for t in range(mask.shape[1] - 1, -1, -1):
        trains = mask[:, t]
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(trains, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(trains, values[:, t], next_value)
        advantages[:, t] = torch.where(trains, next_advantage, 0.0)
    return advantages


def discounted_returns(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of the rewards from each trainable token onwards, float [B, T]."""
    return generalized_advantages(token_rewards, torch.zeros_like(token_rewards), mask, gamma, lam=1.0)


def whiten(values: Tensor, mask: Tensor, step: StepStatistics = ONE_RANK) -> Tensor:
    """Return values normalised to mean 0 and (unbiased) standard deviation 1 over the step's trainable tokens.

    Float [B, T]. Equal values, and fewer than two, become 0.
    """
    return torch.where(mask, normalise(values, step.moments(values, mask)), 0.0)


def normalise(values: Tensor, moments: Moments) -> Tensor:
    """Return values less the mean of ``moments``, over their standard deviation; 0 where that is of equal numbers."""
    if moments.count < 2 or moments.smallest == moments.largest:  # round-off of equal ones would be scaled to noise
        return torch.zeros_like(values)
    return (values - moments.mean) / (moments.std + 1e-8)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, step: StepStatistics = ONE_RANK) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)`` over the step's trainable tokens.

    1 is a perfect critic, 0 a constant. It is 0 when the returns vary by no more than round-off.
    """
    of_values, of_returns = step.moments(values, mask), step.moments(returns, mask)
    of_rest = step.moments(returns - values, mask)
    extremes = (of_values.smallest, of_values.largest, of_returns.smallest, of_returns.largest)
    if of_returns.count < 2 or of_returns.std <= 1e-6 * max(map(abs, extremes)):
        return 0.0
    return 1 - of_rest.variance / of_returns.variance


def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    r"""Return lambda of each sequence, float [B], so that the sum of GAE's weights grows with its length l.

    .. math:: \lambda = 1 - \frac{1}{\alpha\, l}

    See section 4.2 of VAPO (arXiv:2504.05118). Lambda is clamped to 0 for ``alpha * l < 1``.
    """
    length = mask.sum(dim=1)
    return (1 - 1 / (alpha * length.clamp(min=1))).clamp(min=0.0)
