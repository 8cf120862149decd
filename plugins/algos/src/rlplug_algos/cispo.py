"""CISPO: clipped importance sampling weights.

MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", arXiv:2506.13585.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlplug.interfaces import Advantages, Denominators, LossOutput
from rlplug.types import Batch, StepBatch
from rlplug_algos.advantages import group_relative
from rlplug_algos.options import require
from rlplug_algos.policy_gradient import PolicyGradient, present
from rlplug_algos.policy_losses import cispo_loss, token_ratio


@dataclass(kw_only=True, eq=False)
class CISPO(PolicyGradient):
    r"""REINFORCE's loss with GRPO's advantages, weighted by a bounded ratio, so that rare tokens keep their gradient.

    .. math::
        L = -\frac{1}{\sum_i |o_i|} \sum_{i,t} \mathrm{sg}\left[\mathrm{clip}(\rho_{i,t}, \rho_{min}, \rho_{max})\right]
            A_i \log\pi_{i,t}

    (equations 4 and 5), where sg stops the gradient and the sum is divided by the number of tokens.

    Args:
        ratio_min: Smallest weight. 0 sets no limit, as in the paper's experiments.
        ratio_max: Largest weight: the bound itself, 1 + epsilon_high in the paper, which does not give its value. The
            default is that of ScaleRL (arXiv:2510.13786).
        epsilon: Added to the group's standard deviation, as in GRPO.
    """

    compares_groups: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    ratio_min: float = 0.0
    ratio_max: float = 5.0
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "ratio_min", 0 <= self.ratio_min <= 1, "give 0 for no limit, up to 1, the ratio on-policy")
        require(self, "ratio_max", self.ratio_max >= 1, "give at least 1, the ratio on-policy; 5 is usual")

        require(self, "epsilon", 0 <= self.epsilon < math.inf, "give 0 or more, such as 0.0001")

    def advantages(self, batch: StepBatch) -> Advantages:
        relative = group_relative(batch.rewards, batch.reward_valid, batch.group_index, epsilon=self.epsilon)
        return Advantages(relative, metrics=self.advantage_metrics(batch))

    def loss(self, batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        ratio = token_ratio(logprobs, present(batch.old_logprobs))
        term = cispo_loss(logprobs, ratio, present(batch.advantages), self.ratio_min, self.ratio_max)
        return self.total_loss(term, batch, logprobs, entropy, denominators)
