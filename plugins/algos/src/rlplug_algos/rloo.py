"""RLOO: REINFORCE leave-one-out.

Ahmadian et al., "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs",
arXiv:2402.14740.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlplug.interfaces import Advantages, Denominators, LossOutput
from rlplug.types import Batch, StepBatch
from rlplug_algos.advantages import leave_one_out
from rlplug_algos.aggregation import Aggregation
from rlplug_algos.kl import KLEstimator
from rlplug_algos.policy_gradient import ClippedPolicyGradient, present
from rlplug_algos.policy_losses import clipped_loss, sequence_ratio


@dataclass(kw_only=True, eq=False)
class RLOO(ClippedPolicyGradient):
    r"""Policy gradient with a whole completion as one action, and the group's other completions as its baseline.

    .. math::
        R_i = r_i - \beta \sum_t \log\frac{\pi^{old}_{i,t}}{\pi^{ref}_{i,t}} \qquad
        A_i = R_i - \frac{1}{n - 1} \sum_{j \ne i} R_j \qquad
        \rho_i = \prod_t \frac{\pi_{i,t}}{\pi^{old}_{i,t}}

        L = -\frac{1}{N} \sum_i \min\left(\rho_i A_i,\ \mathrm{clip}(\rho_i, 1 - c_{low}, 1 + c_{high}) A_i\right)

    over N completions. The paper takes one optimizer step for each rollout, where the ratio is 1; the clipped ratio for
    more is TRL's. KL is part of the reward, in the estimate of ``kl_estimator`` (above: k1).
    """

    compares_groups: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    aggregation: Aggregation = "sequence"
    kl_estimator: KLEstimator = "k1"

    @property
    def kl_in_reward(self) -> bool:
        return True

    def advantages(self, batch: StepBatch) -> Advantages:
        kl = self.reward_kl(batch)
        rewards = batch.rewards if kl is None else batch.rewards - self.kl_coefficient * batch.tokens.sums(kl)
        left_out = leave_one_out(rewards, batch.reward_valid, batch.group_index)
        return Advantages(left_out, metrics=self.advantage_metrics(batch, kl))

    def loss(self, batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        ratio = sequence_ratio(logprobs, present(batch.old_logprobs), batch, length_normalized=False)
        term = clipped_loss(ratio, present(batch.advantages), *self.clip)
        return self.total_loss(term, batch, logprobs, entropy, denominators)
