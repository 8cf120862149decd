"""Logprobs and entropies of one chunk of logits, and their gradients, for the fused LM head.

Shape legend: C tokens of a chunk, V vocabulary. ``z`` are logits divided by the temperature, in float32.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlplug.ops import scaled_logits, token_logprobs, truncate_logits
from rlplug.types import SamplingParams

TRUNCATED_TOKENS: Final = 512
"""Tokens whose logits are sorted at a time for top-p: a sort needs several times their memory."""


def chunk_logprobs(logits: Tensor, temperature: float, targets: Tensor, with_entropy: bool) -> tuple[Tensor, ...]:
    """Return logprobs, ``logsumexp(z)`` and entropies in nats (0 unless asked for), float32 [C] each.

    The compiled function makes two passes over the logits: one for the maximum, one for all sums.

    Args:
        logits: [C, V], any float dtype.
        temperature: Temperature of the sampling; 1 for greedy sampling.
        targets: int64 [C]: ids of the tokens.
        with_entropy: Whether entropies are computed.
    """
    z = logits.float() / temperature
    largest = z.amax(dim=-1, keepdim=True)
    weights = (z - largest).exp()
    total = weights.sum(dim=-1)
    lse = total.log() + largest.squeeze(-1)
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1).float() / temperature
    if not with_entropy:
        return chosen - lse, lse, torch.zeros_like(lse)
    products = torch.where(z == -torch.inf, 0.0, weights * z)  # 0 * -inf is NaN
    return chosen - lse, lse, lse - products.sum(dim=-1) / total


def logits_gradient(
    logits: Tensor,
    temperature: float,
    targets: Tensor,
    lse: Tensor,
    d_logprobs: Tensor,
    entropies: Tensor | None = None,
    d_entropies: Tensor | None = None,
) -> Tensor:
    """Return the gradient [C, V] of the logits in their dtype, computed in one pass.

    With ``p = softmax(z)``: d logprob / dz = onehot - p, and d H / dz = -p (log p + H); times 1 / temperature.

    Args:
        logits: [C, V], as in the forward pass.
        temperature: As in the forward pass.
        targets: int64 [C]: ids of the tokens.
        lse: float32 [C]: ``logsumexp(z)`` from the forward pass.
        d_logprobs: float32 [C]: gradient of the logprobs.
        entropies: float32 [C], from the forward pass; None when they get no gradient.
        d_entropies: float32 [C]: gradient of the entropies; given with ``entropies``.
    """
    log_p = logits.float() / temperature - lse.unsqueeze(-1)
    pull = d_logprobs.unsqueeze(-1)
    if entropies is not None and d_entropies is not None:
        pull_of_entropies = d_entropies.unsqueeze(-1) * (log_p + entropies.unsqueeze(-1))
        pull = pull + torch.where(log_p == -torch.inf, 0.0, pull_of_entropies)  # exp(log_p) * -inf is NaN
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    onehot = torch.where(tokens == targets.unsqueeze(-1), d_logprobs.unsqueeze(-1), 0.0)
    return ((onehot - log_p.exp() * pull) / temperature).to(logits.dtype)


def truncated_logprobs(logits: Tensor, targets: Tensor, sampling: SamplingParams) -> Tensor:
    """Return logprobs under the distribution that top-k and top-p leave, float32 [C], from logits [C, V]."""
    parts = []
    for part, tokens in zip(torch.split(logits, TRUNCATED_TOKENS), torch.split(targets, TRUNCATED_TOKENS), strict=True):
        z = truncate_logits(scaled_logits(part, sampling.temperature), sampling, keep=tokens)
        parts.append(token_logprobs(z, tokens))
    return torch.cat(parts)
