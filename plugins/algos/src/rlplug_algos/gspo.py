"""Group sequence policy optimisation.

Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlplug.interfaces import Advantages
from rlplug.types import Batch
from rlplug_algos.advantages import group_relative
from rlplug_algos.aggregation import Aggregation
from rlplug_algos.base import ClippedPolicyGradient
from rlplug_algos.policy_losses import PolicyTerm, clipped_loss, sequence_ratio


@dataclass(kw_only=True, eq=False)
class GSPO(ClippedPolicyGradient):
    r"""GRPO with one ratio for each completion: the geometric mean of its tokens' (equations 5 to 7).

    .. math::
        \rho_i = \left(\prod_t \frac{\pi_{i,t}}{\pi^{old}_{i,t}}\right)^{1/|o_i|} \qquad
        L = -\frac{1}{N} \sum_i \min\left(\rho_i A_i,\ \mathrm{clip}(\rho_i, 1 - c_{low}, 1 + c_{high}) A_i\right)

    over N completions, with GRPO's :math:`A_i`. The mean over a completion moves far less than the ratio of one token,
    so the limits are smaller by orders of magnitude: the paper's 3e-4 and 4e-4.
    """

    compares_groups: ClassVar[bool] = True

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: Aggregation = "sequence"

    def advantages(self, batch: Batch) -> Advantages:
        return self.sequence_advantages(batch, group_relative(batch.rewards, batch.reward_valid, batch.group_index))

    def policy_term(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyTerm:
        ratio = sequence_ratio(logprobs, old_logprobs, mask, length_normalized=True)
        return clipped_loss(ratio, advantages, self.clip_low, self.clip_high)
