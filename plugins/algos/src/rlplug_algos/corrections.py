"""Importance corrections for tokens that the engine drew from a slightly different policy than the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlplug.types import Batch
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


def importance_weights(old_logprobs: Tensor, batch: Batch, level: str) -> Tensor:
    """Return the weights before any limit, float [K], without gradient; arguments as of :func:`limited_weights`."""
    difference = (old_logprobs - batch.rollout_logprobs).detach()
    return (batch.spread(batch.sums(difference)) if level == "sequence" else difference).exp()


def limited_weights(old_logprobs: Tensor, batch: Batch, correction: Correction) -> tuple[Tensor, Tensor]:
    """Return the weights of each token's loss, float [K], and which of them a limit changed, bool [K]; no gradient.

    Args:
        old_logprobs: float [K]: the trainer's logprobs at the start of the update.
        batch: With ``rollout_logprobs``, the engine's, with the weights that it sampled with.
        correction: Level, mode and limits.
    """
    weights = importance_weights(old_logprobs, batch, correction.level)
    limited = weights.clamp(correction.floor, correction.cap)
    is_limited = limited != weights
    return limited if correction.mode == "truncate" else weights.masked_fill(is_limited, 0.0), is_limited
