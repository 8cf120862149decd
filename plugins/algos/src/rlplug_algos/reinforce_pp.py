"""REINFORCE++: REINFORCE normalised over the whole batch.

Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
arXiv:2501.03262.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlplug.interfaces import Advantages, Denominators, LossOutput
from rlplug.types import Batch, StepBatch
from rlplug_algos.advantages import discounted_returns, group_relative, normalise, token_rewards, whiten
from rlplug_algos.kl import KLEstimator
from rlplug_algos.options import require
from rlplug_algos.policy_gradient import ClippedPolicyGradient, present
from rlplug_algos.policy_losses import clipped_loss, token_ratio


@dataclass(kw_only=True, eq=False)
class ReinforcePP(ClippedPolicyGradient):
    r"""PPO's clipped loss on returns with a KL penalty at each token, normalised over the batch.

    .. math::
        R_t = \gamma^{T-t}\, r - \beta \sum_{s \ge t} \gamma^{s-t} \log\frac{\pi^{old}_s}{\pi^{ref}_s} \qquad
        A_t = \frac{R_t - \mathrm{mean}(R)}{\mathrm{std}(R)}

    with T the last trainable token. Mean and (unbiased) standard deviation are over all trainable tokens of the step,
    all ranks; the loss is divided by the number of tokens. KL is estimated by ``kl_estimator`` (above: k1). One
    completion per prompt is enough.

    Args:
        gamma: Discount per trainable token. The paper has 1.
    """

    kl_estimator: KLEstimator = "k1"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "gamma", 0 <= self.gamma <= 1, "give a number from 0 to 1")

    @property
    def kl_in_reward(self) -> bool:
        return True

    def advantages(self, batch: StepBatch) -> Advantages:
        kl = self.reward_kl(batch)
        rewards = token_rewards(batch.rewards, batch.num_tokens, kl, self.kl_coefficient)
        returns = discounted_returns(rewards, batch.num_tokens, self.gamma)
        return Advantages(of_tokens=whiten(returns, batch.step), metrics=self.advantage_metrics(batch, kl))

    def loss(self, batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        ratio = token_ratio(logprobs, present(batch.old_logprobs))
        term = clipped_loss(ratio, present(batch.advantages), *self.clip)
        return self.total_loss(term, batch, logprobs, entropy, denominators)


@dataclass(kw_only=True, eq=False)
class ReinforcePPBaseline(ClippedPolicyGradient):
    r"""PPO's clipped loss on rewards less their group's mean, normalised over the batch; KL by k2 in the loss.

    .. math::
        A'_{i,t} = r_i - \mathrm{mean}(r) \qquad A_{i,t} = \frac{A'_{i,t} - \mathrm{mean}(A')}{\mathrm{std}(A')}

    The first mean is the group's; the other statistics are over all trainable tokens of the step, all ranks, so that
    an easy group is not blown up by its own small deviation. A group whose rewards are all equal has A' = 0, and an
    advantage other than 0 where mean(A') is not 0, as completions of different lengths make it. The loss is PPO's
    clipped one, divided by the number of tokens.
    """

    compares_groups: ClassVar[bool] = True

    kl_estimator: KLEstimator = "k2"

    def advantages(self, batch: StepBatch) -> Advantages:
        centred = group_relative(batch.rewards, batch.reward_valid, batch.group_index, normalize_std=False)
        of_tokens = batch.step.moments(batch.spread(centred))
        advantages = torch.where(batch.reward_valid, normalise(centred, of_tokens), 0.0)
        return Advantages(advantages, metrics=self.advantage_metrics(batch))

    def loss(self, batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        ratio = token_ratio(logprobs, present(batch.old_logprobs))
        term = clipped_loss(ratio, present(batch.advantages), *self.clip)
        return self.total_loss(term, batch, logprobs, entropy, denominators)
