"""What the papers' equations say, in float64 NumPy: plain loops over rows and tokens, written without the package.

Arrays are indexed ``[i, t]``: row i, token t. Gradients are derived by hand; ``test_oracles.py`` checks them against
central differences of the values.
"""

from __future__ import annotations

import math

import numpy


def tokens_of(mask, i):
    """The trainable tokens of row i, in order."""
    return [t for t in range(mask.shape[1]) if mask[i, t]]


def members(valid, groups):
    """Rows with a reward, by group; groups without any are there too."""
    return {g: [i for i in range(len(groups)) if groups[i] == g and valid[i]] for g in sorted(set(groups.tolist()))}


def group_relative(rewards, valid, groups, normalize_std=True, epsilon=1e-4):
    """arXiv:2402.03300 section 4.1.2: (r_i - mean r) / std r; without the divisor arXiv:2503.20783."""
    out = numpy.zeros(len(rewards))
    for rows in members(valid, groups).values():
        if len(rows) < 2 or len({rewards[i] for i in rows}) < 2:
            continue
        mean = sum(rewards[i] for i in rows) / len(rows)
        variance = sum((rewards[i] - mean) ** 2 for i in rows) / (len(rows) - 1)
        for i in rows:
            out[i] = (rewards[i] - mean) / (math.sqrt(variance) + epsilon if normalize_std else 1.0)
    return out


def leave_one_out(rewards, valid, groups):
    """The RLOO estimator of arXiv:2402.14740: r_i - 1/(k-1) sum_{j != i} r_j."""
    out = numpy.zeros(len(rewards))
    for rows in members(valid, groups).values():
        for i in rows:
            others = [rewards[j] for j in rows if j != i]
            out[i] = rewards[i] - sum(others) / len(others) if others else 0.0
    return out


def degenerate_share(rewards, valid, groups):
    grouped = members(valid, groups).values()
    return sum(len({rewards[i] for i in rows}) < 2 for rows in grouped) / len(grouped)


def spread(per_row, mask):
    return numpy.array([[per_row[i] if trains else 0.0 for trains in mask[i]] for i in range(len(mask))])


def token_rewards(rewards, mask, kl=None, coefficient=0.0):
    """arXiv:1909.08593 equation 2, per token: the reward with the last one, -beta KL_t with each."""
    out = numpy.zeros(mask.shape)
    for i in range(len(mask)):
        tokens = tokens_of(mask, i)
        for t in tokens:
            out[i, t] = (rewards[i] if t == tokens[-1] else 0.0) - (coefficient * kl[i, t] if kl is not None else 0.0)
    return out


def generalized_advantages(rewards, values, mask, gamma, lam):
    """arXiv:1506.02438 equation 16 as it stands: A_t = sum_l (gamma lambda)^l delta_{t+l}."""
    out = numpy.zeros(mask.shape)
    for i in range(len(mask)):
        tokens, decay = tokens_of(mask, i), gamma * (lam if numpy.isscalar(lam) else lam[i])
        after = [values[i, t] for t in tokens[1:]] + [0.0]
        deltas = [rewards[i, t] + gamma * v - values[i, t] for t, v in zip(tokens, after, strict=False)]
        for n, t in enumerate(tokens):
            out[i, t] = sum(decay**ahead * delta for ahead, delta in enumerate(deltas[n:]))
    return out


def discounted_returns(rewards, mask, gamma):
    """G_t = sum_l gamma^l r_{t+l}."""
    out = numpy.zeros(mask.shape)
    for i in range(len(mask)):
        tokens = tokens_of(mask, i)
        for n, t in enumerate(tokens):
            out[i, t] = sum(gamma**ahead * rewards[i, later] for ahead, later in enumerate(tokens[n:]))
    return out


def whiten(values, mask):
    """Normalisation over the batch, of arXiv:2501.03262: (A - mean A) / std A of its tokens."""
    x = values[mask]
    if len(x) < 2 or (x == x[0]).all():
        return numpy.zeros(mask.shape)
    std = math.sqrt(sum((x - sum(x) / len(x)) ** 2) / (len(x) - 1))
    return numpy.where(mask, (values - sum(x) / len(x)) / (std + 1e-8), 0.0)


def explained_variance(values, returns, mask):
    target, left = returns[mask], (returns - values)[mask]
    # returns that are all the same may differ by what adding and subtracting values rounds off
    if len(target) == 0 or target.std() <= 1e-9 * max(abs(target).max(), abs(values[mask]).max()):
        return 0.0
    return 1 - sum((left - left.mean()) ** 2) / sum((target - target.mean()) ** 2)


def length_adaptive_lambda(mask, alpha):
    """Length-adaptive GAE of arXiv:2504.05118: lambda = 1 - 1 / (alpha l)."""
    lengths = [len(tokens_of(mask, i)) for i in range(len(mask))]
    return numpy.array([min(max(1 - 1 / (alpha * n), 0.0), 1.0) if n else 0.0 for n in lengths])


def overlong_punishment(length, longest, buffer):
    """arXiv:2503.14476 equation 13, its three cases."""
    if length <= longest - buffer:
        return 0.0
    return (longest - buffer - length) / buffer if length <= longest else -1.0


def kl_value(logprob, ref, estimator, k3_max=None):
    """Schulman (2020), with r = ref / pi: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r, limited as in verl."""
    log_r = ref - logprob
    k3 = math.expm1(log_r) - log_r
    return {"k1": -log_r, "k2": log_r**2 / 2}.get(estimator, k3 if k3_max is None else min(k3, k3_max))


def kl_penalty(logprob, old, ref, estimator, k3_max=None, longest=math.inf):
    """Value and derivative in ``logprob``, where d log r = -1 and d rho = rho.

    The unbiased KL estimate of arXiv:2512.02556 is k3 times rho; arXiv:2402.03300 equation 4 is k3 alone. Log rho is
    cut at ``longest`` on either side.
    """
    log_r, value = ref - logprob, kl_value(logprob, ref, estimator, k3_max)
    derivative = {"k1": 1.0, "k2": -log_r}.get(estimator, -math.expm1(log_r))
    both = -log_r + (estimator == "k1")  # value + derivative, which cancel down to this in k3
    if estimator not in ("k1", "k2") and k3_max is not None and kl_value(logprob, ref, estimator) > k3_max:
        derivative, both = 0.0, value
    if estimator in ("k2", "k3_unweighted"):
        return value, derivative
    rho = math.exp(min(max(logprob - old, -longest), longest))
    return rho * value, rho * (both if abs(logprob - old) <= longest else derivative)


def correction_weights(old, rollout, mask, level="token", mode="truncate", cap=2.0, floor=0.0):
    """Truncated (arXiv:1802.01561, c-bar) and masked importance sampling of the trainer's policy over the engine's.

    Also returns whether a token's weight was changed.
    """
    out, limited = numpy.zeros(mask.shape), numpy.zeros(mask.shape, dtype=bool)
    for i in range(len(mask)):
        tokens = tokens_of(mask, i)
        for t in tokens:
            over = tokens if level == "sequence" else [t]
            weight = math.exp(sum(old[i, s] - rollout[i, s] for s in over))
            limited[i, t] = not floor <= weight <= cap
            out[i, t] = weight
            if limited[i, t]:
                out[i, t] = 0.0 if mode == "mask" else min(max(weight, floor), cap)
    return out, limited


def token_weights(mask, num_tokens, num_sequences, aggregation, max_new_tokens=None):
    """What each token's loss is multiplied by before the sum.

    ``token``: arXiv:2503.14476 equation 8. ``sequence``: arXiv:2402.03300 equation 3. ``constant``: arXiv:2503.20783,
    its constant being the longest completion.
    """
    out = numpy.zeros(mask.shape)
    for i in range(len(mask)):
        tokens = tokens_of(mask, i)
        per_row = {"sequence": len(tokens), "constant": max_new_tokens}
        for t in tokens:
            out[i, t] = 1 / num_tokens if aggregation == "token" else 1 / (num_sequences * per_row[aggregation])
    return out


def log_ratios(logprobs, old, mask, kind):
    """log rho of each token, and its derivative in each of the row's logprobs.

    ``token``: arXiv:1707.06347 equation 6. ``mean``: arXiv:2507.18071 equation 7. ``sum``: of whole completions,
    as in arXiv:2402.14740.
    """
    out = numpy.zeros(mask.shape)
    for i in range(len(mask)):
        tokens = tokens_of(mask, i)
        total = sum(logprobs[i, t] - old[i, t] for t in tokens)
        for t in tokens:
            out[i, t] = {"token": logprobs[i, t] - old[i, t], "sum": total}.get(kind, total / len(tokens))
    return out


def log_ratio_derivative(mask, i, t, s, kind):
    """d (log rho of token t) / d (logprob of token s), both of row i."""
    return {"token": float(s == t), "sum": 1.0}.get(kind, 1 / len(tokens_of(mask, i)))


def clipped_loss(ratio, advantage, low, high, dual=None):
    """arXiv:1707.06347 equation 7 and arXiv:1912.09729 (dual clip): loss, d loss / d ratio, clipped low, clipped high.

    By cases. A > 0: the objective is A min(rho, 1 + high). A < 0: A max(rho, 1 - low), not below c A.
    """
    if advantage > 0:
        stopped = ratio > 1 + high
        return -advantage * min(ratio, 1 + high), 0.0 if stopped else -advantage, False, stopped
    if advantage < 0:
        under, over = ratio < 1 - low, dual is not None and ratio > dual
        effective = min(max(ratio, 1 - low), dual) if dual is not None else max(ratio, 1 - low)
        return -advantage * effective, 0.0 if under or over else -advantage, under, over
    return 0.0, 0.0, False, False


def clipped_value_loss(value, old, target, clip):
    """Value clipping as in arXiv:2005.12729 section 3, halved: loss, derivative, clipped."""
    free = 0.5 * (value - target) ** 2
    if clip is None or abs(value - old) <= clip:
        return free, value - target, False
    bounded = 0.5 * (old + math.copysign(clip, value - old) - target) ** 2
    return (bounded, 0.0, True) if bounded > free else (free, value - target, False)
