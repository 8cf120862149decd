"""What the fused output layer computes of one chunk of logits, forward and backward.

Shape legend: C rows of a chunk, V vocabulary. ``z`` are logits divided by the temperature, in float32.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlplug.ops import scaled_logits, token_logprobs, truncate_logits
from rlplug.types import SamplingParams

TRUNCATED_ROWS: Final = 512
"""Rows whose logits are sorted at a time for top-p: a sort needs several times their memory."""


def score_chunk(logits: Tensor, temperature: float, targets: Tensor, with_entropy: bool) -> tuple[Tensor, ...]:
    """Return float32 [C] each: logprobs, ``logsumexp(z)``, and entropies in nats (0 unless asked for).

    Written so that a compiler needs two passes over the logits: one for the maximum, one for all sums.

    Args:
        logits: [C, V], any float dtype.
        temperature: 1 for greedy sampling.
        targets: int64 [C].
        with_entropy: Whether entropies are computed.
    """
    z = logits.float() / temperature
    largest = z.amax(dim=-1, keepdim=True)
    weights = (z - largest).exp()
    total = weights.sum(dim=-1)
    lse = total.log() + largest.squeeze(-1)
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1).float() / temperature
    entropies = lse - (weights * z).sum(dim=-1) / total if with_entropy else torch.zeros_like(lse)
    return chosen - lse, lse, entropies


def logits_gradient(
    logits: Tensor,
    temperature: float,
    targets: Tensor,
    lse: Tensor,
    d_logprobs: Tensor,
    entropies: Tensor | None = None,
    d_entropies: Tensor | None = None,
) -> Tensor:
    """Return [C, V] in the logits' dtype: the gradient, in one pass.

    With ``p = softmax(z)``: d logprob / dz = onehot - p, and d H / dz = -p (log p + H); times 1 / temperature.

    Args:
        logits: [C, V], as in the forward pass.
        temperature: As in the forward pass.
        targets: int64 [C].
        lse: float32 [C], of the forward pass.
        d_logprobs: float32 [C].
        entropies: float32 [C], of the forward pass; None when they get no gradient.
        d_entropies: float32 [C], with ``entropies``.
    """
    log_p = logits.float() / temperature - lse.unsqueeze(-1)
    pull = d_logprobs.unsqueeze(-1)
    if entropies is not None and d_entropies is not None:
        pull = pull + d_entropies.unsqueeze(-1) * (log_p + entropies.unsqueeze(-1))
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    onehot = torch.where(tokens == targets.unsqueeze(-1), d_logprobs.unsqueeze(-1), 0.0)
    return ((onehot - log_p.exp() * pull) / temperature).to(logits.dtype)


def truncated_logprobs(logits: Tensor, targets: Tensor, sampling: SamplingParams) -> Tensor:
    """Return float32 [C]: logprobs under the distribution that top-k and top-p leave, from logits [C, V]."""
    parts = []
    for rows, tokens in zip(torch.split(logits, TRUNCATED_ROWS), torch.split(targets, TRUNCATED_ROWS), strict=True):
        z = truncate_logits(scaled_logits(rows, sampling.temperature), sampling, keep=tokens)
        parts.append(token_logprobs(z, tokens))
    return torch.cat(parts)
