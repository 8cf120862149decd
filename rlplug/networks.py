"""The networks of a run: how each is loaded, edited and sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlplug.critic import CriticConfig, ValueHead, load_critic
from rlplug.errors import ConfigError
from rlplug.interfaces.optimization import Effect, Optimization
from rlplug.policy import PolicyConfig, load_model
from rlplug.strategy import RLFSDP2Strategy


def build_policy(
    config: PolicyConfig, optimizations: Sequence[Optimization], strategy: RLFSDP2Strategy
) -> tuple[nn.Module, list[Effect]]:
    """Return the sharded policy, and what the optimizations changed.

    Raises:
        ConfigError: The model cannot be loaded, or an optimization took no effect.
    """
    policy = load_model(config)
    for optimization in optimizations:
        optimization.before_shard(policy)
    _shard(policy, config.torch_dtype, strategy)
    effects: list[Effect] = []
    for optimization in optimizations:
        optimization.after_shard(policy)
        found = optimization.effects()
        if not found:
            raise ConfigError(
                f"{type(optimization).__name__} took no effect on {config.path}: remove it from model.optimizations."
            )
        effects += found
    return policy, effects


def build_reference(config: PolicyConfig | None, policy: PolicyConfig, strategy: RLFSDP2Strategy) -> nn.Module:
    """Return the frozen reference policy: ``config``, or the policy's initial model."""
    reference = load_model(policy) if config is None else load_model(config, key="model.reference")
    _shard(reference, (config or policy).torch_dtype, strategy)
    return reference.requires_grad_(False).eval()


def build_critic(
    config: CriticConfig, policy: Any, policy_config: PolicyConfig, strategy: RLFSDP2Strategy
) -> nn.Module:
    """Return the critic, or with a shared trunk its head. A head is an FSDP unit of its own, in float32.

    Args:
        config: The critic's.
        policy: The model that a shared trunk belongs to.
        policy_config: Names the trunk when ``config`` does not.
        strategy: Shards.
    """
    if config.share_trunk:
        head = ValueHead(policy.config.get_text_config().hidden_size, config.seed)
        return _shard(head, torch.float32, strategy)
    critic = load_critic(config, policy_config)
    _shard(critic.head, torch.float32, strategy)
    return _shard(critic, (config.trunk or policy_config).torch_dtype, strategy)


def _shard(model: nn.Module, dtype: torch.dtype, strategy: RLFSDP2Strategy) -> nn.Module:
    model.to(strategy.root_device)
    strategy.shard(model, dtype)
    return model
