"""An algorithm of two functions: one for advantages, one for the policy's loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlplug.errors import RunError, brief
from rlplug.interfaces import Advantages, Denominators, LossOutput
from rlplug.types import Batch, StepBatch
from rlplug_algos.functions import ADVANTAGES, POLICY_LOSSES, Function, bound
from rlplug_algos.policy_gradient import PolicyGradient, present
from rlplug_algos.policy_losses import PolicyTerm, token_ratio


@dataclass(kw_only=True, eq=False)
class Composed(PolicyGradient):
    """Policy gradient with advantages and a policy loss by the names of functions, one's own among them.

    KL penalty, entropy bonus, importance correction and aggregation are those of the other algorithms. The defaults are
    GRPO. Functions are in ``rlplug_algos.functions``, which says how to write one.

    Args:
        advantage: Function of the step's completions: ``group`` (GRPO), ``others`` (RLOO), ``returns``
            (REINFORCE++), or ``module.function``.
        policy_loss: Function of logprobs and the micro-batch: ``clipped`` (PPO), ``sequence_clipped`` (GSPO),
            ``bounded_weight`` (CISPO), or ``module.function``.
        advantage_options: Keyword arguments of ``advantage``.
        policy_loss_options: Keyword arguments of ``policy_loss``.
    """

    compares_groups: ClassVar[bool] = True

    advantage: str = "group"
    policy_loss: str = "clipped"
    advantage_options: dict[str, Any] = field(default_factory=dict)
    policy_loss_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._advantage: Function = bound("advantage", ADVANTAGES, self.advantage, self.advantage_options)
        self._policy_loss: Function = bound("policy_loss", POLICY_LOSSES, self.policy_loss, self.policy_loss_options)

    def advantages(self, batch: StepBatch) -> Advantages:
        found = self._advantage(batch)
        found = Advantages(found) if isinstance(found, Tensor) else found
        if not isinstance(found, Advantages):
            raise RunError(f"{self.advantage} must return a tensor [B] or Advantages; it returned {brief(found)}.")
        return replace(found, metrics={**found.metrics, **self.advantage_metrics(batch)})

    def loss(self, batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        term = self._policy_loss(logprobs, batch)
        if isinstance(term, Tensor):  # it says nothing of clipping
            ratio = token_ratio(logprobs, present(batch.old_logprobs)).detach()
            nothing = torch.zeros_like(ratio, dtype=torch.bool)
            term = PolicyTerm(term, ratio, nothing, nothing)
        if not isinstance(term, PolicyTerm) or term.loss.shape != logprobs.shape:
            what = f"a loss of shape {list(term.loss.shape)}" if isinstance(term, PolicyTerm) else brief(term)
            raise RunError(f"{self.policy_loss} must return the loss of each token, [K]; it returned {what}.")
        return self.total_loss(term, batch, logprobs, entropy, denominators)
