"""Whole algorithms in float64 NumPy, put together from ``oracles.py`` as each paper does; settings spelled out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy
import oracles


def arrays(batch):
    """The batch's tensors as NumPy arrays, floats in float64."""
    return SimpleNamespace(
        **{name: (x.detach().double() if x.is_floating_point() else x).numpy() for name, x in batch.tensors().items()}
    )


def shaped_rewards(data, settings, max_new_tokens):
    """Rewards with the whole-completion terms: DAPO's punishment, RLOO's KL (arXiv:2402.14740)."""
    out = data.rewards.copy()
    for i in range(len(out)):
        tokens = oracles.tokens_of(data.response_mask, i)
        if "overlong" in settings:
            buffer, factor = settings["overlong"]
            out[i] += factor * oracles.overlong_punishment(len(tokens), max_new_tokens, buffer)
        if settings.get("sequence_kl"):
            out[i] -= settings["sequence_kl"] * sum(data.old_logprobs[i, t] - data.ref_logprobs[i, t] for t in tokens)
    return out


def advantages(data, settings, max_new_tokens):
    """A namespace of advantages [B, T], returns [B, T] or None, response_mask [B, T], and metrics."""
    mask, valid, groups = data.response_mask, data.reward_valid, data.group_index
    family = settings["advantages"]
    rewards = shaped_rewards(data, settings, max_new_tokens)
    out = SimpleNamespace(returns=None, response_mask=mask, metrics={})
    out.metrics["advantages/degenerate_groups"] = oracles.degenerate_share(data.rewards, valid, groups)
    kl, beta = None, settings.get("token_kl", 0.0)
    if beta or settings.get("sequence_kl"):
        kl = numpy.zeros(mask.shape)
        for i, t in zip(*mask.nonzero(), strict=True):
            estimator = settings.get("token_kl_estimator", "k1")
            before = data.old_logprobs[i, t], data.ref_logprobs[i, t]
            kl[i, t] = oracles.kl_value(*before, estimator, settings.get("k3_max"))
        out.metrics["policy/kl"] = kl.sum() / max(mask.sum(), 1)
    if family == "group":
        per_row = oracles.group_relative(rewards, valid, groups, **settings.get("group", {}))
        if settings.get("overlong_filter"):
            out.response_mask = mask & ~data.truncated[:, None]
        out.advantages = oracles.spread(per_row, out.response_mask)
    elif family == "leave_one_out":
        out.advantages = oracles.spread(oracles.leave_one_out(rewards, valid, groups), mask)
    elif family == "group_whitened":
        # REINFORCE++-baseline of arXiv:2501.03262: the group's mean first, then the batch's statistics
        per_row = oracles.group_relative(rewards, valid, groups, normalize_std=False)
        out.advantages = oracles.whiten(oracles.spread(per_row, mask), mask)
    elif family == "returns_whitened":
        # arXiv:2501.03262: A_t = r - beta sum_{l >= t} KL_l, then whitened
        returns = oracles.discounted_returns(oracles.token_rewards(rewards, mask, kl, beta), mask, settings["gamma"])
        out.advantages = oracles.whiten(returns, mask)
    else:
        actor_critic(out, data, oracles.token_rewards(rewards, mask, kl, beta), settings)
    return out


def actor_critic(out, data, token_rewards, settings):
    """PPO's advantages and returns; with ``alpha`` VAPO's (arXiv:2504.05118: another lambda for each)."""
    mask, values = data.response_mask, data.values
    lam = settings["lam"]
    policy_lam = oracles.length_adaptive_lambda(mask, settings["alpha"]) if "alpha" in settings else lam
    raw = oracles.generalized_advantages(token_rewards, values, mask, settings["gamma"], policy_lam)
    critic = oracles.generalized_advantages(token_rewards, values, mask, settings["gamma"], lam)
    out.returns = numpy.where(mask, critic + values, 0.0)
    out.advantages = oracles.whiten(raw, mask) if settings["whiten"] else raw
    out.metrics["critic/explained_variance"] = oracles.explained_variance(values, out.returns, mask)
    out.metrics["critic/value_mean"] = sum(values[mask]) / max(mask.sum(), 1)


def loss(data, logprobs, entropy, settings, denominators, max_new_tokens, frozen=None):
    """Loss, its derivatives in logprobs and entropy [B, T], metrics, and the ratio's extremes.

    ``frozen``: logprobs for what a stop-gradient makes constant; ``logprobs`` themselves unless a test of this oracle
    says otherwise.
    """
    mask, kind, aggregation = data.response_mask, settings["ratio"], settings["aggregation"]
    num_tokens, num_sequences = max(denominators.num_tokens, 1), max(denominators.num_sequences, 1)
    weights = oracles.token_weights(mask, num_tokens, num_sequences, aggregation, max_new_tokens)
    ratios = numpy.exp(oracles.log_ratios(logprobs, data.old_logprobs, mask, kind))
    constants = numpy.exp(oracles.log_ratios(logprobs if frozen is None else frozen, data.old_logprobs, mask, kind))
    correction, beta = settings.get("correction"), settings.get("kl", 0.0)
    limits, limited = numpy.ones(mask.shape), numpy.zeros(mask.shape)
    if correction is not None:
        limits, limited = oracles.correction_weights(data.old_logprobs, data.rollout_logprobs, mask, **correction)
    total, gradient, entropy_gradient = 0.0, numpy.zeros(mask.shape), numpy.zeros(mask.shape)
    names = ["policy/clip_fraction_low", "policy/clip_fraction_high", "policy/approx_kl"]
    metrics = dict.fromkeys(
        [*names, "correction/weight_mean", "correction/limited_share", "policy/kl", "policy/positive_nll"], 0.0
    )
    for i, t in zip(*mask.nonzero(), strict=True):
        a, weight = data.advantages[i, t], weights[i, t]
        if "ratio_range" in settings:
            low, high = settings["ratio_range"]
            bounded = min(max(constants[i, t], low), high)
            value, under, over = -bounded * a * logprobs[i, t], ratios[i, t] < low, ratios[i, t] > high
            gradient[i, t] -= weight * limits[i, t] * bounded * a
        else:
            value, slope, under, over = oracles.clipped_loss(ratios[i, t], a, *settings["clip"])
            for s in oracles.tokens_of(mask, i):
                moved = ratios[i, t] * oracles.log_ratio_derivative(mask, i, t, s, kind)
                gradient[i, s] += weight * limits[i, t] * slope * moved
        total += weight * limits[i, t] * value
        if beta:
            penalty = logprobs[i, t], data.old_logprobs[i, t], data.ref_logprobs[i, t]
            value, slope = oracles.kl_penalty(*penalty, settings["estimator"], settings.get("k3_max"))
            total, gradient[i, t] = total + weight * beta * value, gradient[i, t] + weight * beta * slope
            metrics["policy/kl"] += oracles.kl_value(penalty[0], penalty[2], "k3") / num_tokens
        bonus = settings.get("entropy", 0.0)
        total, entropy_gradient[i, t] = total - weight * bonus * entropy[i, t], -weight * bonus
        if "nll" in settings and data.reward_valid[i] and data.rewards[i] >= settings["nll"][1]:
            # the positive examples' loss of arXiv:2504.05118, but over all tokens
            total -= settings["nll"][0] * logprobs[i, t] / num_tokens
            gradient[i, t] -= settings["nll"][0] / num_tokens
            metrics["policy/positive_nll"] -= logprobs[i, t] / num_tokens
        d = logprobs[i, t] - data.old_logprobs[i, t]
        seen = [under, over, math.exp(d) - 1 - d, limits[i, t], limited[i, t]]
        for name, x in zip(metrics, seen, strict=False):
            metrics[name] += x / num_tokens
    # a metric of something that is off is not reported
    off = ["policy/kl"] * (not beta) + ["policy/positive_nll"] * ("nll" not in settings)
    off += ["correction/weight_mean", "correction/limited_share"] * (correction is None)
    extremes = (ratios[mask].min(), ratios[mask].max()) if mask.any() else (math.inf, -math.inf)
    return SimpleNamespace(
        loss=total,
        gradient=gradient,
        entropy_gradient=entropy_gradient,
        metrics={name: x for name, x in metrics.items() if name not in off},
        extremes=extremes,
    )


def value_loss(data, values, clip, denominators):
    """The critic's loss, a mean over tokens, its derivative [B, T], and the share of clipped tokens."""
    total, gradient, clipped = 0.0, numpy.zeros(values.shape), 0
    for i, t in zip(*data.response_mask.nonzero(), strict=True):
        value, slope, stopped = oracles.clipped_value_loss(values[i, t], data.values[i, t], data.returns[i, t], clip)
        total, clipped = total + value, clipped + stopped
        gradient[i, t] = slope / max(denominators.num_tokens, 1)
    num_tokens = max(denominators.num_tokens, 1)
    return total / num_tokens, gradient, clipped / num_tokens
