"""Advantage estimators: functions of the rewards and values of a step. B sequences of this rank, K trainable tokens.

``valid`` is ``batch.reward_valid``: rewards where it is false are ignored, and results are 0 there. ``num_tokens`` is
``batch.num_tokens``, the trainable tokens of each sequence, which follow one another in tensors [K].
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


def token_rewards(rewards: Tensor, num_tokens: Tensor, kl: Tensor | None = None, coefficient: float = 0.0) -> Tensor:
    """Return token rewards, float [K]: the sequence's on its last trainable token, minus ``coefficient * kl``.

    The penalty counts on every trainable token, as in InstructGPT (arXiv:2203.02155, equation 2).
    """
    per_token = rewards.new_zeros(int(num_tokens.sum()))
    per_token[_last_tokens(num_tokens)] = rewards[num_tokens > 0]
    return per_token if kl is None else per_token - coefficient * kl


def generalized_advantages(
    token_rewards: Tensor, values: Tensor, num_tokens: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    r"""Return generalised advantage estimates, float [K].

    .. math::
        \delta_t = r_t + \gamma V(s_{t+1}) - V(s_t) \qquad A_t = \delta_t + \gamma \lambda A_{t+1}

    This is equation 16 of arXiv:1506.02438. Tokens of the environment, between two turns of the policy, are no steps:
    the next trainable token follows directly. After the last one the value is 0, also for a truncated completion.

    Args:
        token_rewards: float [K].
        values: float [K]: V of the state before each token.
        num_tokens: int64 [B].
        gamma: Discount per token.
        lam: lambda: one number for all sequences, or one per sequence [B].
    """
    last = _last_tokens(num_tokens)
    following = values.roll(-1)
    following[last] = 0.0
    lambdas = lam.repeat_interleave(num_tokens) if isinstance(lam, Tensor) else torch.full_like(values, lam)
    decay = gamma * lambdas
    decay[last] = 0.0
    longest = int(num_tokens.max()) if len(num_tokens) else 0
    return _decayed_sums(token_rewards + gamma * following - values, decay, longest)


def _decayed_sums(terms: Tensor, decay: Tensor, longest: int) -> Tensor:
    """Return ``x_t = terms_t + decay_t * x_{t+1}``, float [K], where no run of other decays than 0 is over ``longest``.

    Each round doubles the terms that an entry sums, so that 32,768 tokens take 15 rounds over all sequences at once
    (Hillis and Steele, 1986) rather than 32,768 dependent ones.
    """
    sums, reach = terms.clone(), 1
    while reach < longest and bool(decay.any()):  # a decay below 1 is soon 0 in floating point
        carried = torch.where(decay[:-reach] == 0, 0.0, decay[:-reach] * sums[reach:])  # NaN stays in its sequence
        sums[:-reach] += carried
        decay = torch.cat([decay[:-reach] * decay[reach:], decay.new_zeros(reach)])
        reach *= 2
    return sums


def _last_tokens(num_tokens: Tensor) -> Tensor:
    """Return the index of the last token of each sequence that has one."""
    return (num_tokens.cumsum(0) - 1)[num_tokens > 0]


def discounted_returns(token_rewards: Tensor, num_tokens: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of the rewards from each trainable token onwards, float [K]."""
    return generalized_advantages(token_rewards, torch.zeros_like(token_rewards), num_tokens, gamma, lam=1.0)


def whiten(values: Tensor, step: StepStatistics = ONE_RANK) -> Tensor:
    """Return values normalised to mean 0 and (unbiased) standard deviation 1 over the step's trainable tokens.

    Float [K]. Equal values, and fewer than two, become 0.
    """
    return normalise(values, step.moments(values))


def normalise(values: Tensor, moments: Moments) -> Tensor:
    """Return values less the mean of ``moments``, over their standard deviation; 0 where that is of equal numbers."""
    if moments.count < 2 or moments.smallest == moments.largest:  # round-off of equal ones would be scaled to noise
        return torch.zeros_like(values)
    return (values - moments.mean) / (moments.std + 1e-8)


def explained_variance(values: Tensor, returns: Tensor, step: StepStatistics = ONE_RANK) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)`` over the step's trainable tokens.

    1 is a perfect critic, 0 a constant. It is 0 when the returns vary by no more than round-off.
    """
    of_values, of_returns, of_rest = step.moments(values), step.moments(returns), step.moments(returns - values)
    extremes = (of_values.smallest, of_values.largest, of_returns.smallest, of_returns.largest)
    if of_returns.count < 2 or of_returns.std <= 1e-6 * max(map(abs, extremes)):
        return 0.0
    return 1 - of_rest.variance / of_returns.variance


def length_adaptive_lambda(num_tokens: Tensor, alpha: float) -> Tensor:
    r"""Return lambda of each sequence, float [B], so that the sum of GAE's weights grows with its length l.

    .. math:: \lambda = 1 - \frac{1}{\alpha\, l}

    See section 4.2 of VAPO (arXiv:2504.05118). Lambda is clamped to 0 for ``alpha * l < 1``.
    """
    return (1 - 1 / (alpha * num_tokens.clamp(min=1))).clamp(min=0.0)
