"""The models of a run with their optimizers: the actor, with some algorithms a critic, and a frozen reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from rlplug.interfaces.algorithm import Algorithm, LossOutput
from rlplug.models.critic import CriticConfig
from rlplug.models.forward import critic_forward, policy_forward, value_head_forward
from rlplug.models.lm_head import TokenLogprobs
from rlplug.models.packing import PackedMicroBatch
from rlplug.types import SamplingParams


@dataclass(frozen=True)
class TrainableModel:
    """A sharded model with an optimizer of its own."""

    name: Literal["policy", "critic"]
    module: nn.Module
    optimizer: Any
    scheduler: Any
    """Learning-rate scheduler, or ``None``."""
    max_grad_norm: float | None


@dataclass(frozen=True)
class ForwardOutput:
    """Results of forward-only passes, ``None`` for what they do not compute.

    float32 [K] of a micro-batch, or [N] of a rank's own rows.
    """

    tokens: TokenLogprobs | None = None
    """Logprobs of the policy."""
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class ActorCritic:
    """The models of a run, and their forward-only passes over a micro-batch."""

    policy: TrainableModel
    critic: TrainableModel | None
    """A :class:`Critic`, or with ``critic_config.share_trunk`` a :class:`ValueHead`."""
    critic_config: CriticConfig | None
    reference: nn.Module | None
    algorithm: Algorithm
    sampling: SamplingParams
    loss_hook: Callable[..., LossOutput] | None
    """The hook ``rlplug_compute_loss``, where a plugin wraps the policy's loss; ``None`` calls ``algorithm.loss``."""

    @property
    def shares_trunk(self) -> bool:
        return self.critic_config is not None and self.critic_config.share_trunk

    def policy_trains(self, step: int) -> bool:
        """Return whether ``step``, from 1, updates the policy: not while a critic warms up."""
        return self.critic_config is None or step > self.critic_config.warmup_steps

    def needs_old_logprobs(self, step: int, is_on_policy: bool) -> bool:
        """Return whether the batch of ``step`` needs ``old_logprobs``, or its one update can take its own."""
        return not is_on_policy or self.algorithm.needs.old_logprobs or not self.policy_trains(step)

    def forward_policy(self, micro_batch: PackedMicroBatch) -> ForwardOutput:
        """Return the policy's logprobs, and with a shared trunk the values."""
        output = policy_forward(self.policy.module, micro_batch, self.sampling, "none")
        if self.critic is None or not self.shares_trunk:
            return ForwardOutput(output.tokens)
        return ForwardOutput(output.tokens, values=value_head_forward(self.critic.module, output, micro_batch))

    def forward_reference(self, micro_batch: PackedMicroBatch) -> ForwardOutput:
        """Return the reference policy's logprobs."""
        assert self.reference is not None
        output = policy_forward(self.reference, micro_batch, self.sampling, "none")
        return ForwardOutput(ref_logprobs=output.tokens.logprobs)

    def forward_critic(self, micro_batch: PackedMicroBatch) -> ForwardOutput:
        """Return the values of a critic with a trunk of its own."""
        assert self.critic is not None
        return ForwardOutput(values=critic_forward(self.critic.module, micro_batch))
