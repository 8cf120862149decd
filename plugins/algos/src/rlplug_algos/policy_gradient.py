"""What the algorithms share: importance weights, KL penalty, entropy bonus, aggregation and metrics of the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from torch import Tensor

from rlplug.interfaces import Algorithm, Denominators, LossDivisor, LossOutput, Needs, RunInfo
from rlplug.types import Batch, StepBatch
from rlplug_algos.advantages import degenerate_share
from rlplug_algos.aggregation import Aggregation, aggregate
from rlplug_algos.corrections import Correction, limited_weights
from rlplug_algos.kl import KLEstimator, kl_estimate, kl_penalty
from rlplug_algos.options import require, require_use
from rlplug_algos.policy_losses import PolicyTerm


@dataclass(kw_only=True, eq=False)
class PolicyGradient(Algorithm):
    r"""Base of the algorithms: a subclass gives ``advantages``, and a ``loss`` that ends with :meth:`total_loss`.

    .. math:: L = \mathrm{aggregate}\left(w_t L^{policy}_t + \beta\, \mathrm{KL}_t - \alpha H_t\right)

    The weights w of ``correction`` multiply the policy term only, as in TRL. KL leaves the loss where the algorithm, or
    its option, puts it into the rewards.

    Args:
        aggregation: Divisor of the sum over tokens, always counted over the whole mini-batch and all ranks:
            ``token``, the number of tokens; ``sequence``, each completion's length, then the number of completions;
            ``constant``, the number of completions times ``max_new_tokens``.
        kl_coefficient: beta, weight of the divergence from the reference policy. Above 0, a frozen reference policy is
            kept, which takes the memory of a second model.
        kl_estimator: ``k1``, ``k2``, ``k3`` or ``k3_unweighted``. In the loss, k1 and k3 carry the ratio to the old
            policy, which makes their gradients right off-policy too; k2's is right on-policy; that of
            ``k3_unweighted``, the GRPO paper's, is the forward divergence's. In the rewards only the value counts.
        k3_max: Largest k3 of a token, in nats, for ``kl_estimator`` k3 and k3_unweighted; above it, k3 has no gradient.
            verl has 10; ``null`` sets no limit.
        entropy_coefficient: alpha, weight of the entropy bonus.
        correction: Importance weights between the rollout engine and the trainer; ``null`` for none. ``{}`` truncates
            each token's at 2, and so does ``auto`` where the engine calculates in FP8; elsewhere it is ``null``.
    """

    compares_groups: ClassVar[bool] = False
    """Whether advantages compare the completions of a prompt."""
    streams: ClassVar[bool] = False
    """Whether a group's advantages need that group alone, and no critic."""

    aggregation: Aggregation = "token"
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3_unweighted"
    k3_max: float | None = None
    entropy_coefficient: float = 0.0
    correction: Correction | Literal["auto"] | None = "auto"
    run: RunInfo | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        for key, choices in (("aggregation", get_args(Aggregation)), ("kl_estimator", get_args(KLEstimator))):
            require(self, key, getattr(self, key) in choices, f"give one of {', '.join(choices)}")
        require(self, "kl_coefficient", 0 <= self.kl_coefficient < math.inf, "give 0 or more")
        is_limit = self.k3_max is None or 0 < self.k3_max < math.inf
        require(self, "k3_max", is_limit, "give a positive number, such as 10, or null")
        has_k3 = self.kl_coefficient > 0 and self.kl_estimator in ("k3", "k3_unweighted")
        require_use(self, "k3_max", has_k3, "a kl_coefficient above 0 and a kl_estimator of k3 or k3_unweighted")
        require(self, "entropy_coefficient", math.isfinite(self.entropy_coefficient), "give a number, such as 0.001")

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty goes into the rewards rather than the loss."""
        return False

    @property
    def current_kl_coefficient(self) -> float:
        """Coefficient beta of the KL penalty in this step."""
        return self.kl_coefficient

    @property
    def current_correction(self) -> Correction | None:
        """Importance correction of this run, with ``auto`` resolved; ``None`` for none."""
        if self.correction == "auto":
            return Correction() if self.run is not None and self.run.fp8_rollout else None
        return self.correction

    @property
    def needs(self) -> Needs:
        has_kl = self.kl_coefficient > 0
        return Needs(
            groups=self.compares_groups,
            old_logprobs=has_kl and self.kl_in_reward,
            reference_policy=has_kl,
            rollout_logprobs=self.current_correction is not None,
            entropy_gradient=self.entropy_coefficient != 0,
        )

    @property
    def streamed_divisor(self) -> LossDivisor | None:
        if not self.streams:
            return None
        return "num_tokens" if self.aggregation == "token" else "num_sequences"

    def setup(self, run: RunInfo) -> None:
        self.run = run

    def reward_kl(self, batch: StepBatch) -> Tensor | None:
        """Return the KL estimate that goes into the rewards, float [K]; ``None`` without one."""
        if not (self.kl_coefficient > 0 and self.kl_in_reward):
            return None
        old_logprobs, ref_logprobs = present(batch.tokens.old_logprobs), present(batch.tokens.ref_logprobs)
        return kl_estimate(old_logprobs, ref_logprobs, self.kl_estimator, self.k3_max)

    def advantage_metrics(self, batch: StepBatch, kl: Tensor | None = None) -> dict[str, float]:
        """Return the share of groups without a signal, and the mean of the KL that went into the rewards."""
        share = degenerate_share(batch.rewards, batch.reward_valid, batch.group_index, batch.step)
        metrics = {"advantages/degenerate_groups": share}
        return metrics if kl is None else metrics | {"policy/kl": batch.step.mean(kl)}

    def total_loss(
        self, term: PolicyTerm, batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators
    ) -> LossOutput:
        """Return the micro-batch's share of L from the policy's loss of each token."""
        correction, old_logprobs = self.current_correction, present(batch.old_logprobs)
        per_token = term.loss
        measured = {
            "policy/clip_fraction_low": term.clipped_low,
            "policy/clip_fraction_high": term.clipped_high,
            "policy/approx_kl": kl_estimate(old_logprobs, logprobs.detach(), "k3"),  # of KL(old || policy)
        }
        if correction is not None:
            weights, is_limited = limited_weights(old_logprobs, batch, correction)
            per_token = per_token * weights
            measured |= {"correction/weight_mean": weights, "correction/limited_share": is_limited}
        if self.kl_coefficient > 0 and not self.kl_in_reward:
            ref_logprobs = present(batch.ref_logprobs)
            penalty = kl_penalty(logprobs, old_logprobs, ref_logprobs, self.kl_estimator, self.k3_max)
            per_token = per_token + self.current_kl_coefficient * penalty
            measured["policy/kl"] = kl_estimate(logprobs.detach(), ref_logprobs, "k3")
        if self.entropy_coefficient != 0:
            per_token = per_token - self.entropy_coefficient * entropy
        max_new_tokens = None if self.run is None else self.run.max_new_tokens
        return LossOutput(
            aggregate(per_token, batch, denominators, self.aggregation, max_new_tokens),
            metrics={name: mean_over_tokens(values, denominators) for name, values in measured.items()},
            maxima={"policy/ratio_max": term.ratio.amax() if len(term.ratio) else term.ratio.new_tensor(-math.inf)},
            minima={"policy/ratio_min": term.ratio.amin() if len(term.ratio) else term.ratio.new_tensor(math.inf)},
            per_token={"ratio": term.ratio, "clipped_low": term.clipped_low, "clipped_high": term.clipped_high},
        )


@dataclass(kw_only=True, eq=False)
class ClippedPolicyGradient(PolicyGradient):
    """Policy gradient with PPO's clipped loss.

    Args:
        clip_low: Largest distance of the ratio below 1 before its gradient stops.
        clip_high: Largest distance of the ratio above 1 before its gradient stops.
        clip_dual: c above 1: the loss of a token with negative advantage is at most c|A| (dual clip, arXiv:1912.09729;
            its c is 3); ``null`` sets no limit.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        usual = type(self)
        fix = f"give a number between 0 and 1, such as {usual.clip_low}"
        require(self, "clip_low", 0 < self.clip_low < 1, fix)
        require(self, "clip_high", self.clip_high > 0, f"give a number above 0, such as {usual.clip_high}")
        is_bound = self.clip_dual is None or 1 < self.clip_dual < math.inf
        require(self, "clip_dual", is_bound, "give more than 1, such as 3, or null")

    @property
    def clip(self) -> tuple[float, float, float | None]:
        """The limits, for :func:`~rlplug_algos.policy_losses.clipped_loss`."""
        return self.clip_low, self.clip_high, self.clip_dual


def present(values: Tensor | None) -> Tensor:
    """Return ``values``, which the training loop has computed because ``needs`` asks for them."""
    assert values is not None
    return values


def mean_over_tokens(values: Tensor, denominators: Denominators) -> Tensor:
    """Return a micro-batch's share of the mini-batch's mean of ``values`` [K]."""
    return values.float().sum() / max(denominators.num_tokens, 1)
