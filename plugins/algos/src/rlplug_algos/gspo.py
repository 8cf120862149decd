"""Group sequence policy optimisation.

Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlplug.interfaces import Denominators, LossOutput
from rlplug.types import Batch
from rlplug_algos.aggregation import Aggregation
from rlplug_algos.grpo import GRPO
from rlplug_algos.policy_gradient import present
from rlplug_algos.policy_losses import clipped_loss, sequence_ratio


@dataclass(kw_only=True, eq=False)
class GSPO(GRPO):
    r"""GRPO with one ratio for each completion: the geometric mean of its tokens' (equations 5 to 7).

    .. math::
        \rho_i = \left(\prod_t \frac{\pi_{i,t}}{\pi^{old}_{i,t}}\right)^{1/|o_i|} \qquad
        L = -\frac{1}{N} \sum_i \min\left(\rho_i A_i,\ \mathrm{clip}(\rho_i, 1 - c_{low}, 1 + c_{high}) A_i\right)

    over N completions, with GRPO's :math:`A_i`. The mean over a completion moves far less than the ratio of one token,
    so the limits are smaller by orders of magnitude: the paper's 3e-4 and 4e-4.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: Aggregation = "sequence"

    def loss(self, batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        ratio = sequence_ratio(logprobs, present(batch.old_logprobs), batch, length_normalized=True)
        term = clipped_loss(ratio, present(batch.advantages), *self.clip)
        return self.total_loss(term, batch, logprobs, entropy, denominators)
