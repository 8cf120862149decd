"""Pure functions on tensors: logprobs and entropy from logits, engine-trainer mismatch."""

from __future__ import annotations

from typing import Any, Final

import numpy
import torch
from torch import Tensor

from rlplug.types import ONE_RANK, SamplingParams, StepStatistics


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """Return ``logits / temperature`` in float32; greedy (temperature 0) leaves them unscaled.

    Args:
        logits: [..., V], any float dtype.
    """
    logits = logits.float()
    return logits if temperature in (0.0, 1.0) else logits / temperature


def truncate_logits(logits: Tensor, sampling: SamplingParams, keep: Tensor | None = None) -> Tensor:
    """Return the logits with ``-inf`` for the tokens that top-k and top-p exclude.

    Top-k comes first, top-p counts the probability of the remaining tokens, and the most likely token always stays,
    as in the engines.

    Args:
        logits: float32 [..., V], already divided by the temperature.
        keep: int64 [...]: token ids that always stay. A trainer in another precision may rank a sampled token just
            outside the set that the engine kept.
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
    """Return the entropy in nats, ``H = logsumexp(z) - sum softmax(z) z``, of float32 logits [..., V].

    A logit may be ``-inf``: its token adds 0 to the sum.
    """
    lse = logits.logsumexp(dim=-1)
    mean: Tensor = _MeanLogit.apply(logits.softmax(dim=-1), logits)  # type: ignore[no-untyped-call]
    return lse - mean


class _MeanLogit(torch.autograd.Function):
    """``sum p z`` over the vocabulary, where a token with ``p = 0`` and ``z = -inf`` adds 0, not ``0 * -inf = NaN``.

    Masking z beforehand would keep one more [..., V] tensor for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(probabilities, logits)
        products = (probabilities * logits).masked_fill_(logits == -torch.inf, 0.0)
        return products.sum(dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        probabilities, logits = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(-1)
        return (gradient * logits).masked_fill_(logits == -torch.inf, 0.0), gradient * probabilities


MOST_VALUES: Final = 65536
"""Largest number of values of which several ranks compute percentiles together: of more, evenly spaced ones."""


def difference_metrics(tokens: Tensor, sequences: Tensor, step: StepStatistics = ONE_RANK) -> dict[str, float]:
    """Return how far the logprobs of engine and trainer are apart, as metrics. Collective.

    Args:
        tokens: float [n]: the trainer's logprob less the engine's, of this rank's tokens.
        sequences: float [s]: its sum over each of this rank's sequences that has such tokens.
        step: Sums over all ranks.

    Returns:
        ``mismatch/mean`` and ``mismatch/max``: absolute difference in nats. ``mismatch/kl``: the k3 estimate of
        ``KL(engine || trainer)``, ``mean(exp(d) - 1 - d)`` with ``d = trainer - engine`` (Schulman, "Approximating
        KL divergence", 2020). ``mismatch/weight_p1``, ``_p50``, ``_p99``: percentiles of the importance weight
        ``exp(d)`` over tokens. ``mismatch/sequence_weight_p1``, ...: of ``exp(sum of d)`` over completions.
    """
    absolute = step.moments(tokens.abs())
    percentiles = {
        **_percentiles("mismatch/weight", tokens, step),
        **_percentiles("mismatch/sequence_weight", sequences, step),
    }
    return percentiles | {
        "mismatch/mean": absolute.mean,
        "mismatch/max": absolute.largest if absolute.count else 0.0,
        "mismatch/kl": step.mean(tokens.expm1() - tokens),
    }


def _percentiles(name: str, log_weights: Tensor, step: StepStatistics) -> dict[str, float]:
    counts = [int(count) for count in step.gather(torch.tensor(float(len(log_weights))))]
    if not any(counts):
        return {}
    stride = 1 if len(counts) == 1 else -(-sum(counts) // MOST_VALUES)
    kept = log_weights if stride == 1 else log_weights.sort().values[stride // 2 :: stride]
    sizes = [len(range(stride // 2, count, stride)) for count in counts]
    gathered = step.gather(torch.nn.functional.pad(kept, (0, max(sizes) - len(kept))))
    values = numpy.concatenate([row[:size] for row, size in zip(gathered.numpy(), sizes, strict=True)])
    found = numpy.percentile(values, (1, 50, 99))  # torch.quantile refuses more than 16M elements
    weights = torch.from_numpy(found).exp().tolist()
    return {f"{name}_p{q}": weight for q, weight in zip((1, 50, 99), weights, strict=True)}
