"""Who learns in a run: the policy, and with some algorithms a critic; and who only gives numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rlplug.interfaces.algorithm import Algorithm
from rlplug.models.critic import CriticConfig
from rlplug.models.forward import critic_forward, head_values, policy_forward
from rlplug.models.packing import PackedMicroBatch
from rlplug.training.losses import (
    CriticLoss,
    Objective,
    PolicyLoss,
    SharedTrunkLoss,
    TrainableModel,
    ValueHeadLoss,
)
from rlplug.types import SamplingParams


@dataclass(frozen=True)
class ActorCritic:
    """The networks of a run, what they compute for a batch, and what each step trains."""

    policy: TrainableModel
    critic: TrainableModel | None
    """A :class:`Critic`, or with ``critic_config.share_trunk`` a :class:`ValueHead`."""
    critic_config: CriticConfig | None
    reference: nn.Module | None
    algorithm: Algorithm
    sampling: SamplingParams
    hook: Any

    @property
    def shares_trunk(self) -> bool:
        return self.critic_config is not None and self.critic_config.share_trunk

    def policy_trains(self, step: int) -> bool:
        """Return whether ``step``, from 1, updates the policy: not while a critic warms up."""
        return self.critic_config is None or step > self.critic_config.warmup_steps

    def needs_old_logprobs(self, step: int, is_on_policy: bool) -> bool:
        """Return whether the batch of ``step`` needs ``old_logprobs``, or its one update can take its own."""
        return not is_on_policy or self.algorithm.needs.old_logprobs or not self.policy_trains(step)

    def objectives(self, step: int) -> list[Objective]:
        """Return what ``step`` minimises, in order."""
        policy = PolicyLoss(self.policy, self.algorithm, self.sampling, self.hook)
        if self.critic is None:
            return [policy]
        assert self.critic_config is not None
        if self.shares_trunk:
            if self.policy_trains(step):
                return [SharedTrunkLoss(policy, self.critic, self.critic_config.value_coefficient)]
            return [ValueHeadLoss(policy, self.critic)]
        critic = CriticLoss(self.critic, self.algorithm, self.critic_config.num_epochs)
        return [policy, critic] if self.policy_trains(step) else [critic]

    def trainees(self, step: int) -> list[TrainableModel]:
        """Return whose optimizers ``step`` moves."""
        return [trainee for objective in self.objectives(step) for trainee in objective.trainees]

    # ---- forward-only passes over a micro-batch -------------------------------------------------------------------

    def policy_pass(self, rows: PackedMicroBatch) -> list[Tensor]:
        """Return ``logprobs``, ``sampled_logprobs``, and with a shared trunk ``values``: [b, t] each."""
        output = policy_forward(self.policy.module, rows, self.sampling, "none")
        values = [head_values(self.critic.module, output, rows)] if self.critic and self.shares_trunk else []
        return [output.logprobs, output.sampled_logprobs, *values]

    def reference_pass(self, rows: PackedMicroBatch) -> Sequence[Tensor]:
        """Return ``ref_logprobs`` [b, t]."""
        assert self.reference is not None
        return [policy_forward(self.reference, rows, self.sampling, "none").logprobs]

    def critic_pass(self, rows: PackedMicroBatch) -> Sequence[Tensor]:
        """Return ``values`` [b, t] of a critic with a trunk of its own."""
        assert self.critic is not None
        return [critic_forward(self.critic.module, rows)]
