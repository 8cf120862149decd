"""Proximal policy optimisation, with a critic.

Schulman et al., "Proximal Policy Optimization Algorithms", arXiv:1707.06347; for language models Ouyang et al.,
"Training language models to follow instructions with human feedback", arXiv:2203.02155.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from rlplug.interfaces import Advantages, Denominators, LossOutput, Needs, RunInfo
from rlplug.types import Batch, StepBatch
from rlplug_algos.advantages import explained_variance, generalized_advantages, token_rewards, whiten
from rlplug_algos.aggregation import aggregate
from rlplug_algos.kl import AdaptiveKL, KLEstimator
from rlplug_algos.options import require, require_use
from rlplug_algos.policy_gradient import ClippedPolicyGradient, mean_over_tokens, present
from rlplug_algos.policy_losses import clipped_loss, token_ratio
from rlplug_algos.value_losses import clipped_value_loss


@dataclass(kw_only=True, eq=False)
class PPO(ClippedPolicyGradient):
    r"""Clipped losses for policy and critic, with generalised advantages (GAE) of each token.

    .. math::
        A_t = \sum_{l \ge 0} (\gamma \lambda)^l \delta_{t+l} \qquad
        \delta_t = r_t - \beta\, \mathrm{KL}_t + \gamma V_{t+1} - V_t \qquad G_t = A_t + V_t

        L^{policy}_t = -\min\left(\rho A,\ \mathrm{clip}(\rho, 1 - c_{low}, 1 + c_{high}) A\right) \qquad
        L^{critic}_t = \tfrac{1}{2} \max\left((V - G)^2,\ (\mathrm{clip}(V, V^{old} \pm c_V) - G)^2\right)

    The reward comes with the last token (arXiv:2203.02155). Equations: 7 of arXiv:1707.06347, 16 of arXiv:1506.02438.
    The critic's loss is divided by the number of tokens; so is the policy's, unless ``aggregation`` says otherwise. One
    completion per prompt is enough. The run needs ``model.critic``.

    Args:
        gamma: Discount per token.
        gae_lambda: lambda: 0 trusts the critic alone, 1 the rewards alone.
        value_clip: c_V, largest change of a value in an update before its gradient stops; ``null`` sets no limit.
        whiten_advantages: Normalise advantages over all trainable tokens of the step. The critic's targets are not.
        kl_in: Place of the KL penalty: ``reward``, as above, or ``loss``.
        kl_target: Adapt ``kl_coefficient`` to keep this divergence, in nats per token (arXiv:1909.08593); ``null``
            keeps the coefficient.
        kl_horizon: With ``kl_target``, the completions over which the coefficient adapts; at least those of a step.
    """

    kl_estimator: KLEstimator = "k1"
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_clip: float | None = 0.2
    whiten_advantages: bool = True
    kl_in: Literal["reward", "loss"] = "reward"
    kl_target: float | None = None
    kl_horizon: int = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("gamma", "gae_lambda"):
            require(self, key, 0 <= getattr(self, key) <= 1, "give a number from 0 to 1")
        require(self, "value_clip", self.value_clip is None or self.value_clip > 0, "give a positive number, or null")
        require(self, "kl_in", self.kl_in in ("reward", "loss"), "give reward or loss")
        require(self, "kl_target", self.kl_target is None or self.kl_target > 0, "give a positive number, or null")
        has_kl = self.kl_target is None or self.kl_coefficient > 0
        require(self, "kl_target", has_kl, "give kl_coefficient a number above 0 for it to start from, such as 0.05")
        require(self, "kl_horizon", self.kl_horizon >= 1, "give 1 or more")
        require_use(self, "kl_horizon", self.kl_target is not None, "kl_target")
        self._adaptive_kl: AdaptiveKL | None = None
        if self.kl_target is not None:
            self._adaptive_kl = AdaptiveKL(self.kl_coefficient, self.kl_target, self.kl_horizon)

    def setup(self, run: RunInfo) -> None:
        super().setup(run)
        # with more than 5 horizons of completions in a step, the coefficient would change its sign
        fits = self.kl_target is None or self.kl_horizon >= run.num_completions
        require(self, "kl_horizon", fits, f"give at least the completions of a step, {run.num_completions}")

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_in == "reward"

    @property
    def current_kl_coefficient(self) -> float:
        return self.kl_coefficient if self._adaptive_kl is None else self._adaptive_kl.coefficient

    @property
    def needs(self) -> Needs:
        return dataclasses.replace(super().needs, critic=True)

    def lambdas(self, num_tokens: Tensor) -> tuple[float | Tensor, float]:
        """Return lambda of the policy's advantages, one or [B], and of the critic's targets."""
        return self.gae_lambda, self.gae_lambda

    def advantages(self, batch: StepBatch) -> Advantages:
        num_tokens, kl, step = batch.num_tokens, self.reward_kl(batch), batch.step
        values = present(batch.tokens.values)
        rewards = token_rewards(batch.rewards, num_tokens, kl, self.current_kl_coefficient)
        of_policy, of_critic = self.lambdas(num_tokens)
        advantages = generalized_advantages(rewards, values, num_tokens, self.gamma, of_policy)
        for_critic = advantages
        if of_critic is not of_policy:
            for_critic = generalized_advantages(rewards, values, num_tokens, self.gamma, of_critic)
        returns = values + for_critic
        metrics = self.advantage_metrics(batch, kl) | {
            "critic/explained_variance": explained_variance(values, returns, step),
            "critic/value_mean": step.mean(values),
        }
        if self._adaptive_kl is not None:
            metrics["policy/kl_coefficient"] = self._adaptive_kl.coefficient
        if self.whiten_advantages:
            advantages = whiten(advantages, step)
        return Advantages(of_tokens=advantages, returns=returns, metrics=metrics)

    def loss(self, batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        ratio = token_ratio(logprobs, present(batch.old_logprobs))
        term = clipped_loss(ratio, present(batch.advantages), *self.clip)
        return self.total_loss(term, batch, logprobs, entropy, denominators)

    def value_loss(self, batch: Batch, values: Tensor, denominators: Denominators) -> LossOutput:
        per_token, clipped = clipped_value_loss(values, present(batch.values), present(batch.returns), self.value_clip)
        metrics = {"critic/clip_fraction": mean_over_tokens(clipped, denominators)}
        return LossOutput(aggregate(per_token, batch, denominators, "token"), metrics)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        # a step that trained the critic alone has no policy loss, so no KL to adapt to
        if self._adaptive_kl is not None and "loss" in metrics:
            assert self.run is not None
            self._adaptive_kl.update(metrics["policy/kl"], self.run.num_completions)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._adaptive_kl is None else {"kl_coefficient": self._adaptive_kl.coefficient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._adaptive_kl is not None and "kl_coefficient" in state:
            self._adaptive_kl.coefficient = state["kl_coefficient"]
