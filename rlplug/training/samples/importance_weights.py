"""Importance weights of the tokens of a step, by their age in policy versions."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from rlplug.types import StepBatch

LARGEST_LOG_WEIGHT: Final = 20.0
"""Logarithms of weights are cut to this size, in nats: an algorithm cuts weights long before."""


def weights_by_age(batch: StepBatch, sampled_logprobs: Tensor, policy_version: int, max_age: int) -> dict[str, float]:
    """Return mean and maximum of pi(token) / pi_engine(token) for each age that tokens have. Collective.

    A mean far from 1 says that tokens of that age were sampled by another policy than the one that trains.

    Args:
        batch: This rank's rows of the step, with ``rollout_logprobs`` and ``policy_versions``.
        sampled_logprobs: float32 [N], the trainer's, before the update.
        policy_version: Version of the trainer's weights.
        max_age: Largest age, in versions, of which there is a metric.

    Returns:
        ``partial/weight_mean_<age>``, ``partial/weight_max_<age>`` and ``partial/token_share_<age>``, the share of the
        tokens, for the ages that occur.
    """
    tokens = batch.per_token
    mask = tokens["response_mask"]
    ages = policy_version - tokens["policy_versions"][mask]
    difference = sampled_logprobs.numpy()[mask] - tokens["rollout_logprobs"][mask]
    weights = np.exp(np.clip(difference.astype(np.float64), -LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT))
    of_ages = [weights[ages == age] for age in range(max_age + 1)]
    mine = torch.tensor([[len(found), found.sum(), found.max(initial=0.0)] for found in of_ages], dtype=torch.float64)
    counts, sums, largest = batch.step.gather(mine).unbind(dim=2)
    metrics = {}
    for age, count in enumerate(counts.sum(dim=0).tolist()):
        if count:
            metrics[f"partial/weight_mean_{age}"] = float(sums[:, age].sum()) / count
            metrics[f"partial/weight_max_{age}"] = float(largest[:, age].max())
            metrics[f"partial/token_share_{age}"] = count / float(counts.sum())
    return metrics
