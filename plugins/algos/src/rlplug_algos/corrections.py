"""Importance corrections for tokens that the engine drew from a slightly different policy than the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlplug_algos.options import require


@dataclass
class Correction:
    r"""Weights of the policy's loss, the trainer's over the engine's probability, :math:`w=\pi_{old}/\pi_{rollout}`.

    They correct the numerical mismatch between engine and trainer with the same weights, and staleness: the engine's
    weights may be older than those at the start of the update.

    Args:
        level: ``token`` weighs each token by its own ratio; ``sequence`` weighs all tokens of a completion by the
            product of their ratios, which has no bias and more variance.
        mode: ``truncate`` limits w to [floor, cap] (truncated importance sampling, TIS); ``mask`` drops tokens whose w
            is outside (masked importance sampling, MIS; IcePop, arXiv:2510.18855).
        cap: Largest weight. 2 is usual for tokens.
        floor: Smallest weight.
    """

    level: Literal["token", "sequence"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    cap: float = 2.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        require(self, "level", self.level in ("token", "sequence"), "give token or sequence")
        require(self, "mode", self.mode in ("truncate", "mask"), "give truncate or mask")
        require(self, "cap", self.cap >= 1, "give at least 1, such as 2")
        require(self, "floor", 0 <= self.floor <= 1, "give a number from 0 to 1, such as 0.5")


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return the weights before any limit, float [B, T], without gradient; 1 where ``mask`` is false."""
    difference = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()
    if level == "sequence":
        difference = torch.where(mask, difference.sum(dim=1, keepdim=True), 0.0)
    return difference.exp()


def correction_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, correction: Correction) -> Tensor:
    """Return the weights of each token's loss, float [B, T], without gradient; 1 where ``mask`` is false.

    Args:
        old_logprobs: float [B, T]: the trainer's logprobs at the start of the update.
        rollout_logprobs: float [B, T]: the engine's logprobs, with the weights that it sampled with.
        mask: bool [B, T]: trainable tokens.
        correction: Level, mode and limits.
    """
    weights = importance_weights(old_logprobs, rollout_logprobs, mask, correction.level)
    limited = weights.clamp(correction.floor, correction.cap)
    if correction.mode == "truncate":
        return limited
    return torch.where(limited == weights, weights, 0.0)
