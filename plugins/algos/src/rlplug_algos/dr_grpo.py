"""Dr. GRPO: GRPO without its two biases.

Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlplug.interfaces import Advantages
from rlplug.types import StepBatch
from rlplug_algos.advantages import group_relative
from rlplug_algos.aggregation import Aggregation
from rlplug_algos.base import ClippedPolicyGradient


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
        return self.sequence_advantages(batch, centred)
