"""Dr. GRPO: GRPO without its two biases.

Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlplug.interfaces import Advantages, Denominators, LossOutput
from rlplug.types import Batch, StepBatch
from rlplug_algos.advantages import group_relative
from rlplug_algos.aggregation import Aggregation
from rlplug_algos.policy_gradient import ClippedPolicyGradient, present
from rlplug_algos.policy_losses import clipped_loss, token_ratio


@dataclass(kw_only=True, eq=False)
class DrGRPO(ClippedPolicyGradient):
    r"""GRPO with advantages that are only centred, and no division by a length (arXiv:2503.20783, section 3.1).

    .. math:: A_{i,t} = r_i - \mathrm{mean}(r) \qquad L = \frac{\sum_{i,t} L_{i,t}}{N \cdot \mathrm{max\_new\_tokens}}

    with PPO's clipped loss as :math:`L_{i,t}` and N completions. Dividing by a standard deviation weighs prompts by
    their difficulty; dividing by a completion's length favours short right answers and long wrong ones.
    """

    compares_groups: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    aggregation: Aggregation = "constant"

    def advantages(self, batch: StepBatch) -> Advantages:
        centred = group_relative(batch.rewards, batch.reward_valid, batch.group_index, normalize_std=False)
        return Advantages(centred, metrics=self.advantage_metrics(batch))

    def loss(self, batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        ratio = token_ratio(logprobs, present(batch.old_logprobs))
        term = clipped_loss(ratio, present(batch.advantages), *self.clip)
        return self.total_loss(term, batch, logprobs, entropy, denominators)
