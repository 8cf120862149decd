"""Group relative policy optimisation.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv:2402.03300.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlplug.interfaces import Advantages, Denominators, LossOutput
from rlplug.types import Batch, StepBatch
from rlplug_algos.advantages import group_relative
from rlplug_algos.options import require, require_use
from rlplug_algos.policy_gradient import ClippedPolicyGradient, present
from rlplug_algos.policy_losses import clipped_loss, token_ratio


@dataclass(kw_only=True, eq=False)
class GRPO(ClippedPolicyGradient):
    r"""Policy gradient with advantages relative to the group, PPO's clipped ratio, and optionally a KL penalty.

    For token t of completion i, in a group with rewards r (equation 3 and section 4.1.2 of arXiv:2402.03300):

    .. math::
        A_{i,t} = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + \epsilon} \qquad
        \rho_{i,t} = \frac{\pi_{i,t}}{\pi^{old}_{i,t}}

        L = \frac{1}{\sum_i |o_i|} \sum_{i,t} \left[
            -\min\left(\rho A,\ \mathrm{clip}(\rho, 1 - c_{low}, 1 + c_{high}) A\right) + \beta\, \mathrm{KL} \right]

    The standard deviation is the unbiased one. A group whose rewards are all equal has advantages of 0. By default L is
    divided by the number of tokens, as in DAPO (arXiv:2503.14476, equation 8), and has no KL penalty, as in TRL; the
    paper has ``aggregation: sequence`` and ``kl_coefficient: 0.04``.

    Args:
        normalize_std: Divide by the group's standard deviation; ``false`` only centres advantages.
        epsilon: Added to the group's standard deviation. verl has 1e-6, TRL 1e-4. Without any difference among the
            group's rewards advantages are 0 whatever it is.
    """

    compares_groups: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    normalize_std: bool = True
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "epsilon", 0 <= self.epsilon < math.inf, "give 0 or more, such as 0.0001")
        require_use(self, "epsilon", self.normalize_std, "normalize_std")

    def advantages(self, batch: StepBatch) -> Advantages:
        relative = group_relative(
            batch.rewards, batch.reward_valid, batch.group_index, self.normalize_std, self.epsilon
        )
        return Advantages(relative, metrics=self.advantage_metrics(batch))

    def loss(self, batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        ratio = token_ratio(logprobs, present(batch.old_logprobs))
        term = clipped_loss(ratio, present(batch.advantages), *self.clip)
        return self.total_loss(term, batch, logprobs, entropy, denominators)
