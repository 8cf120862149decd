"""How far the engine's logprobs are from the trainer's, for the same tokens and the same weights."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from rlplug.ops.masking import masked_mean


def mismatch_metrics(rollout_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Compare two float32 [B, T] logprobs under ``mask``.

    Returns:
        ``mismatch/mean`` and ``mismatch/max``: absolute difference in nats. ``mismatch/kl``: the k3 estimate of
        ``KL(engine || trainer)``, ``mean(exp(d) - 1 - d)`` with ``d = trainer - engine`` (Schulman, "Approximating
        KL divergence", 2020). ``mismatch/weight_p1``, ``_p50``, ``_p99``: percentiles of the importance weight
        ``exp(d)`` over tokens. ``mismatch/sequence_weight_p1``, ...: of ``exp(sum of d)`` over completions.
    """
    difference = (trainer_logprobs - rollout_logprobs).masked_fill(~mask, 0.0)
    percentiles = {
        **_percentiles("mismatch/weight", difference[mask]),
        **_percentiles("mismatch/sequence_weight", difference.sum(dim=1)[mask.any(dim=1)]),
    }
    return percentiles | {
        "mismatch/mean": float(masked_mean(difference.abs(), mask)),
        "mismatch/max": float(difference.abs().max()),
        "mismatch/kl": float(masked_mean(difference.expm1() - difference, mask)),
    }


def _percentiles(name: str, log_weights: Tensor) -> dict[str, float]:
    if not len(log_weights):
        return {}
    found = numpy.percentile(log_weights.numpy(), (1, 50, 99))  # torch.quantile refuses more than 16M elements
    weights = torch.from_numpy(found).exp().tolist()
    return {f"{name}_p{q}": weight for q, weight in zip((1, 50, 99), weights, strict=True)}
