"""DAPO: GRPO for long chains of thought.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv:2503.14476.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlplug.interfaces import Advantages, RunInfo
from rlplug.types import Sample, StepBatch
from rlplug_algos.advantages import group_relative
from rlplug_algos.grpo import GRPO
from rlplug_algos.options import require, require_use


@dataclass(kw_only=True, eq=False)
class DAPO(GRPO):
    r"""GRPO with a higher upper clip, a mean over tokens, dynamic sampling, and a soft length penalty.

    For completion i of length :math:`|o_i|` in its group (equations 8, 9 and 13 of arXiv:2503.14476):

    .. math::
        A_{i,t} = \frac{r'_i - \mathrm{mean}(r')}{\mathrm{std}(r') + \epsilon} \qquad
        r'_i = r_i + p \cdot \mathrm{clip}\left(\frac{L_{max} - L_{cache} - |o_i|}{L_{cache}},\ -1,\ 0\right)

    with :math:`L_{max}` = ``max_new_tokens``; lengths are trainable tokens. The loss is PPO's clipped one, divided by
    the number of tokens of the mini-batch. There is no KL penalty unless ``kl_coefficient`` is set.

    Args:
        dynamic_sampling: Replace prompts whose completions all have the same reward (or fewer than 2 valid ones), since
            their advantages are 0. Rewards are compared before the overlong penalty, as in the paper's code, which
            filters by accuracy. A prompt whose advantages the penalty turns to 0 is replaced as well.
        max_refills: Rounds of further prompts that a step may draw to replace them.
        over_sampling: Prompts that each round draws, as a multiple of the groups that are missing; the paper's code
            draws 3 times as many.
        overlong_filter: Do not train on truncated completions. Their rewards still count in their group.
        overlong_buffer: L_cache, the number of tokens before ``max_new_tokens`` at which the penalty starts; ``null``
            for no penalty. The paper has 4096 of 20480.
        overlong_penalty: p, the penalty at ``max_new_tokens``.
    """

    clip_high: float = 0.28
    dynamic_sampling: bool = True
    max_refills: int = 9
    over_sampling: float = 1.0
    overlong_filter: bool = False
    overlong_buffer: int | None = None
    overlong_penalty: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "max_refills", self.max_refills >= 0, "give 0 or more")
        require(self, "over_sampling", 1 <= self.over_sampling < 100, "give 1, which draws what is missing, to 100")
        for key in ("max_refills", "over_sampling"):
            require_use(self, key, self.dynamic_sampling, "dynamic_sampling")
        require(self, "overlong_buffer", self.overlong_buffer is None or self.overlong_buffer >= 1, "give 1 or more")
        require(self, "overlong_penalty", self.overlong_penalty >= 0, "give 0 or more; it is subtracted")
        require_use(self, "overlong_penalty", self.overlong_buffer is not None, "overlong_buffer")

    def setup(self, run: RunInfo) -> None:
        super().setup(run)
        fits = self.overlong_buffer is None or self.overlong_buffer < run.max_new_tokens
        fix = f"give less than model.sampling.max_new_tokens, which is {run.max_new_tokens}"
        require(self, "overlong_buffer", fits, fix)

    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        if not self.dynamic_sampling:
            return group
        scored = [sample for sample in group if not sample.errors]
        rewards = torch.tensor([sample.trained_reward for sample in scored], dtype=torch.float32)
        lengths = torch.tensor([sample.num_response_tokens for sample in scored])
        return group if self._has_signal(rewards) and self._has_signal(self._shaped(rewards, lengths)) else ()

    def _has_signal(self, rewards: Tensor) -> bool:
        """Return whether a group's rewards, float32 [B] as in a batch, give an advantage other than 0."""
        everyone = torch.ones_like(rewards, dtype=torch.bool)
        one_group = torch.zeros_like(rewards, dtype=torch.int64)
        return bool(group_relative(rewards, everyone, one_group, self.normalize_std, self.epsilon).any())

    def advantages(self, batch: StepBatch) -> Advantages:
        rewards = self._shaped(batch.rewards, batch.num_tokens)
        relative = group_relative(rewards, batch.reward_valid, batch.group_index, self.normalize_std, self.epsilon)
        trains = batch.spread(~batch.truncated) if self.overlong_filter else None
        return Advantages(relative, trains=trains, metrics=self.advantage_metrics(batch))

    def _shaped(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """Return the rewards, float [B], plus p times equation 13 of the int64 [B] lengths, which is from -p to 0."""
        if self.overlong_buffer is None:
            return rewards
        assert self.run is not None
        excess = (self.run.max_new_tokens - self.overlong_buffer - lengths.to(rewards.dtype)) / self.overlong_buffer
        return rewards + self.overlong_penalty * excess.clamp(-1, 0)
