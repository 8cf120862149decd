"""VAPO: PPO for long chains of thought.

Yue et al., "VAPO: Efficient and Reliable Reinforcement Learning for Advanced Reasoning Tasks", arXiv:2504.05118.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlplug.interfaces import Denominators, LossOutput
from rlplug.types import Batch
from rlplug_algos.advantages import length_adaptive_lambda
from rlplug_algos.options import require
from rlplug_algos.ppo import PPO


@dataclass(kw_only=True, eq=False)
class VAPO(PPO):
    r"""PPO with a lambda that adapts to length, another one for the critic, and a likelihood term for good completions.

    .. math::
        \lambda_{policy} = 1 - \frac{1}{\alpha l} \qquad
        L = L^{policy} - \mu \frac{\sum_{i \in P} \sum_t \log\pi_{i,t}}{\sum_i |o_i|}

    with l trainable tokens in a completion, and P the completions with a reward of at least ``positive_reward``. The
    divisor is the number of tokens of the whole mini-batch; the paper's is that of P, which depends on the split into
    micro-batches. The loss is thus smaller by the share of tokens in P.

    The paper trains the critic alone first: 50 steps, ``model.critic.warmup_steps``.

    Args:
        alpha: Scale of the policy's lambda: the weights in its advantages sum to about alpha * l. The paper has 0.05.
        critic_lambda: lambda of the critic's targets; 1 makes them the returns themselves.
        positive_nll_coefficient: mu, weight of the likelihood term; 0 for none.
        positive_reward: Smallest reward of a good completion.
    """

    clip_high: float = 0.28
    gae_lambda: float = field(init=False, default=1.0, repr=False)  # alpha and critic_lambda take its place
    alpha: float = 0.05
    critic_lambda: float = 1.0
    positive_nll_coefficient: float = 0.1
    positive_reward: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "alpha", self.alpha > 0, "give a positive number, such as 0.05")
        require(self, "critic_lambda", 0 <= self.critic_lambda <= 1, "give a number from 0 to 1")
        require(self, "positive_nll_coefficient", self.positive_nll_coefficient >= 0, "give 0 or more")

    def lambdas(self, num_tokens: Tensor) -> tuple[float | Tensor, float]:
        return length_adaptive_lambda(num_tokens, self.alpha), self.critic_lambda

    def loss(self, batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        """Return the micro-batch's share of the loss L."""
        output = super().loss(batch, logprobs, entropy, denominators)
        is_positive = batch.reward_valid & (batch.rewards >= self.positive_reward)
        nll = -torch.where(batch.spread(is_positive), logprobs, 0.0).sum() / max(denominators.num_tokens, 1)
        return dataclasses.replace(
            output,
            loss=output.loss + self.positive_nll_coefficient * nll,
            metrics=output.metrics | {"policy/positive_nll": nll.detach()},
        )
