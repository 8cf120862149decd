"""Group relative policy optimisation.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv:2402.03300.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlplug.interfaces import Advantages
from rlplug.types import StepBatch
from rlplug_algos.advantages import group_relative
from rlplug_algos.base import ClippedPolicyGradient, GroupNormalized
from rlplug_algos.options import require_use


@dataclass(kw_only=True, eq=False)
class GRPO(GroupNormalized, ClippedPolicyGradient):
    r"""Policy gradient with advantages relative to the group, PPO's clipped ratio, and optionally a KL penalty.

    For completion i of a group with rewards r (equation 3 and section 4.1.2 of arXiv:2402.03300):

    .. math::
        A_{i,t} = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + \epsilon} \qquad
        L_{i,t} = -\min\left(\rho A,\ \mathrm{clip}(\rho, 1 - c_{low}, 1 + c_{high}) A\right) + \beta\, \mathrm{KL}

    The standard deviation is the unbiased one. By default L is divided by the number of tokens, as in DAPO
    (arXiv:2503.14476, equation 8), and has no KL penalty, as in TRL; the paper has ``aggregation: sequence`` and
    ``kl_coefficient: 0.04``.

    Args:
        normalize_std: Divide by the group's standard deviation; ``false`` only centres advantages.
    """

    normalize_std: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_use(self, "epsilon", self.normalize_std, "normalize_std")

    def advantages(self, batch: StepBatch) -> Advantages:
        per_sequence = group_relative(
            batch.rewards, batch.reward_valid, batch.group_index, self.normalize_std, self.epsilon
        )
        return self.sequence_advantages(batch, per_sequence)
