"""Networks of critics, and how they are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlplug.interfaces.optimization import Effect, Optimization
from rlplug.models.build import edit_and_shard, of_network, of_start
from rlplug.models.critic import CriticConfig
from rlplug.models.transformers_trainer import TRANSFORMERS

if TYPE_CHECKING:
    from rlplug.distributed.strategy import RLFSDP2Strategy
    from rlplug.interfaces.trainer import ModelConfig, ModelTrainer


class ValueHead(nn.Module):
    """Linear layer from hidden states to values, always in float32: bf16 would round values to 1%."""

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        # small, so that the first values are near 0 (Huang et al., "The N Implementation Details of RLHF with PPO")
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.linear.weight, std=1 / (hidden_size + 1), generator=generator)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return float32 [...] values of hidden states [..., D]."""
        values: Tensor = self.linear(hidden.float())
        return values.squeeze(-1)


class Critic(nn.Module):
    """A value head on a trunk of its own, of :meth:`rlplug.interfaces.ModelTrainer.empty_trunk`."""

    def __init__(self, trunk: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head

    def forward(self, positions: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Return the values of the states at ``positions`` of one row of tokens, float32 [K].

        Args:
            positions: int64 [K].
            inputs: Arguments of the trunk's forward method.
        """
        values: Tensor = self.head(self.trunk(**inputs).last_hidden_state[0, positions])
        return values


def empty_critic(config: CriticConfig, policy: ModelConfig, trainer: ModelTrainer = TRANSFORMERS) -> Critic:
    """Build a critic with a trunk of its own: a causal language model without its output layer, on the meta device.

    The head is on the CPU, with its initial weights.
    """
    trunk: Any = trainer.empty_trunk(*config.trunk_source(policy))
    return Critic(trunk, ValueHead(trunk.config.get_text_config().hidden_size, config.seed))


def build_critic(
    config: CriticConfig,
    policy: Any,
    policy_config: ModelConfig,
    optimizations: Sequence[Optimization],
    strategy: RLFSDP2Strategy,
    trainer: ModelTrainer = TRANSFORMERS,
) -> tuple[nn.Module, list[Effect]]:
    """Return the critic, or with a shared trunk its head, and its effects. A head is a float32 FSDP unit of its own.

    Args:
        policy_config: Configuration of the policy, and of a trunk that ``config`` does not name.
    """
    if config.share_trunk:
        head = ValueHead(policy.config.get_text_config().hidden_size, config.seed)
        strategy.shard(head, torch.float32)
        return head, []
    trunk, key = config.trunk_source(policy_config)
    critic = empty_critic(config, policy_config, trainer)
    strategy.shard(critic.head, torch.float32)
    effects = edit_and_shard("critic", critic, trunk, optimizations, strategy, trainer, critic.trunk)
    effects = [of_start(trainer.load_weights(critic.trunk, trunk, key)), *effects]
    return critic, of_network("critic", effects)
