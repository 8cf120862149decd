"""Critics of the tests: on the CPU, unsharded, with their weights."""

from __future__ import annotations

import torch

from rlplug.models.config import ModelConfig
from rlplug.models.critic import CriticConfig
from rlplug.models.critic.network import Critic, empty_critic
from rlplug.models.loading import to_empty_on
from rlplug.models.transformers_trainer import TRANSFORMERS


def load_critic(config: CriticConfig, policy: ModelConfig) -> Critic:
    """Build a critic with a trunk of its own."""
    critic = empty_critic(config, policy)
    to_empty_on(critic, torch.device("cpu"))
    TRANSFORMERS.load_weights(critic.trunk, *config.trunk_source(policy))
    return critic
