"""Advantage estimators: pure functions on the rewards and values of a step. B sequences, T tokens.

``mask`` is ``batch.response_mask`` and ``valid`` is ``batch.reward_valid``. What lies outside of them never counts and
comes out as 0, whatever it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Groups:
    """The valid rewards of each prompt, added up. G groups."""

    of_row: Tensor
    """int64 [B]: the number of a row's group, from 0"""
    size: Tensor
    """[G]: valid rewards"""
    total: Tensor
    """[G]"""
    has_signal: Tensor
    """bool [G]: at least two valid rewards, not all equal"""

    @staticmethod
    def of(rewards: Tensor, valid: Tensor, group_index: Tensor) -> _Groups:
        of_row = torch.unique(group_index, return_inverse=True)[1]
        num_groups = int(of_row.max()) + 1 if len(of_row) else 0
        zeros, rows = rewards.new_zeros(num_groups), of_row[valid]
        size = zeros.index_add(0, rows, torch.ones_like(rewards[valid]))
        total = zeros.index_add(0, rows, rewards[valid])
        largest = zeros.scatter_reduce(0, rows, rewards[valid], "amax", include_self=False)
        smallest = zeros.scatter_reduce(0, rows, rewards[valid], "amin", include_self=False)
        return _Groups(of_row, size, total, largest > smallest)


def group_relative(
    rewards: Tensor, valid: Tensor, group_index: Tensor, normalize_std: bool = True, epsilon: float = 1e-4
) -> Tensor:
    r"""Return each reward relative to its group, float [B].

    .. math:: A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + \epsilon}

    Section 4.1.2 of arXiv:2402.03300; without the division it is Dr.GRPO's (arXiv:2503.20783). Mean and standard
    deviation, the unbiased one as in TRL and verl, are over the group's valid rewards. A row without a reward gets 0,
    and so does a group without a signal: fewer than two rewards, or all of them equal.

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

    Section 2 of arXiv:2402.14740 (Kool et al., 2019). 0 for a row without a reward or without a valid sibling.
    """
    groups = _Groups.of(rewards, valid, group_index)
    size, total = groups.size[groups.of_row], groups.total[groups.of_row]
    baseline = (total - rewards) / (size - 1).clamp(min=1)
    return torch.where(valid & (size > 1), rewards - baseline, 0.0)


def degenerate_share(rewards: Tensor, valid: Tensor, group_index: Tensor) -> float:
    """Return the share of groups without a signal: fewer than two valid rewards, or all of them equal."""
    has_signal = _Groups.of(rewards, valid, group_index).has_signal
    return float((~has_signal).float().mean()) if len(has_signal) else 0.0


def spread(per_sequence: Tensor, mask: Tensor) -> Tensor:
    """Put a number per sequence [B] on each of its trainable tokens: float [B, T]."""
    return torch.where(mask, per_sequence[:, None], 0.0)


def token_rewards(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, coefficient: float = 0.0) -> Tensor:
    """Return float [B, T] rewards: the sequence's on its last trainable token, minus ``coefficient * kl`` on each.

    The KL penalty per token is that of InstructGPT (arXiv:2203.02155, equation 2).
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

    Equation 16 of arXiv:1506.02438. Tokens of the environment, between two turns of the policy, are no steps: the next
    trainable token follows directly. After the last one the value is 0, also for a completion that was cut.

    Args:
        token_rewards: float [B, T].
        values: float [B, T]: V of the state before each token.
        mask: bool [B, T].
        gamma: Discount per token.
        lam: lambda, for all rows or one per row [B].
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
    """Return the discounted sum of the rewards from each trainable token on, float [B, T]."""
    return generalized_advantages(token_rewards, torch.zeros_like(token_rewards), mask, gamma, lam=1.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale to mean 0 and (unbiased) standard deviation 1 over all trainable tokens, float [B, T].

    Equal values, and fewer than two, come out as 0.
    """
    chosen = values[mask]
    if len(chosen) < 2 or bool(chosen.max() == chosen.min()):  # dividing what rounding left of equal values is noise
        return torch.zeros_like(values)
    return torch.where(mask, (values - chosen.mean()) / (chosen.std() + 1e-8), 0.0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)`` over trainable tokens: 1 is a perfect critic, 0 a constant.

    0 when the returns do not vary by more than rounding.
    """
    values, returns = values[mask], returns[mask]
    largest = max(values.abs().max(), returns.abs().max()) if len(returns) else 0.0
    if len(returns) < 2 or returns.std() <= 1e-6 * largest:
        return 0.0
    return float(1 - (returns - values).var() / returns.var())


def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    r"""Return lambda of each sequence, float [B], so that the sum of GAE's weights grows with its length l.

    .. math:: \lambda = 1 - \frac{1}{\alpha\, l}

    Section 4.2 of VAPO (arXiv:2504.05118). Clamped to 0 for ``alpha * l < 1``.
    """
    length = mask.sum(dim=1)
    return (1 - 1 / (alpha * length.clamp(min=1))).clamp(min=0.0)
