"""CISPO: clipped importance sampling weights.

MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", arXiv:2506.13585.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlplug_algos.base import GroupNormalized
from rlplug_algos.options import require
from rlplug_algos.policy_losses import PolicyTerm, cispo_loss, token_ratio


@dataclass(kw_only=True, eq=False)
class CISPO(GroupNormalized):
    r"""REINFORCE's loss with GRPO's advantages, weighted by a bounded ratio, so that rare tokens keep their gradient.

    .. math::
        L = -\frac{1}{\sum_i |o_i|} \sum_{i,t} \mathrm{sg}\left[\mathrm{clip}(\rho_{i,t}, \rho_{min}, \rho_{max})\right]
            A_i \log\pi_{i,t}

    (equations 4 and 5), where sg stops the gradient and the sum is divided by the number of tokens.

    Args:
        ratio_min: Smallest weight. 0 sets no limit, as in the paper's experiments.
        ratio_max: Largest weight: the bound itself, 1 + epsilon_high in the paper, which does not give its value. The
            default is that of ScaleRL (arXiv:2510.13786).
    """

    ratio_min: float = 0.0
    ratio_max: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "ratio_min", 0 <= self.ratio_min <= 1, "give 0 for no limit, up to 1, the ratio on-policy")
        require(self, "ratio_max", self.ratio_max >= 1, "give at least 1, the ratio on-policy; 5 is usual")

    def policy_term(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyTerm:
        return cispo_loss(logprobs, token_ratio(logprobs, old_logprobs), advantages, self.ratio_min, self.ratio_max)
