"""How far the engine's logprobs are from the trainer's, for the same tokens and the same weights."""

from __future__ import annotations

from torch import Tensor

from rlplug.ops.masking import masked_mean


def mismatch_metrics(rollout_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Compare two float32 [B, T] logprobs under ``mask``.

    Returns:
        ``mismatch/mean`` and ``mismatch/max``: absolute difference in nats. ``mismatch/kl``: the k3 estimate of
        ``KL(engine || trainer)``, ``mean(exp(d) - 1 - d)`` with ``d = trainer - engine`` (Schulman, "Approximating
        KL divergence", 2020).
    """
    difference = (trainer_logprobs - rollout_logprobs).masked_fill(~mask, 0.0)
    return {
        "mismatch/mean": float(masked_mean(difference.abs(), mask)),
        "mismatch/max": float(difference.abs().max()),
        "mismatch/kl": float(masked_mean(difference.expm1() - difference, mask)),
    }
