"""Log-probabilities and entropy from logits, and the distribution that sampling really draws from."""

from __future__ import annotations

import torch
from torch import Tensor

from rlplug.types import SamplingParams


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """Return ``logits / temperature`` in float32; greedy (temperature 0) leaves them unscaled.

    Args:
        logits: [..., V], any float dtype.
    """
    logits = logits.float()
    return logits if temperature in (0.0, 1.0) else logits / temperature


def truncate_logits(logits: Tensor, sampling: SamplingParams, keep: Tensor | None = None) -> Tensor:
    """Set the logits that top-k and top-p exclude to ``-inf``.

    Top-k comes first, top-p counts the probability of what is left, and the most likely token always stays, as in
    the engines.

    Args:
        logits: float32 [..., V], already divided by the temperature.
        keep: int64 [...]: token ids that stay whatever their rank. A trainer in another precision may rank a
            sampled token just outside the set that the engine kept.
    """
    if sampling.top_k == 0 and sampling.top_p == 1:
        return logits
    excluded = torch.zeros_like(logits, dtype=torch.bool)
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        excluded |= logits < kth
    if sampling.top_p < 1:
        ordered, order = logits.masked_fill(excluded, -torch.inf).sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        excluded |= torch.zeros_like(excluded).scatter(-1, order, before >= sampling.top_p)
    if keep is not None:
        excluded = excluded.scatter(-1, keep.unsqueeze(-1), False)
    return logits.masked_fill(excluded, -torch.inf)


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return ``log softmax(logits)[token_ids]`` without materialising the softmax.

    Args:
        logits: float32 [..., V].
        token_ids: int64 [...].
    """
    chosen = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(dim=-1)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats, ``H = logsumexp(z) - sum softmax(z) z``, of float32 logits [..., V]."""
    return logits.logsumexp(dim=-1) - (logits.softmax(dim=-1) * logits).sum(dim=-1)
