"""The critic, a value head on a trunk of its own or on the policy's: its configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import nn
from torch.optim import Optimizer

from rlplug.errors import ConfigError
from rlplug.interfaces.trainer import ModelConfig
from rlplug.types.ranges import Epochs, Positive, Range, Seed, Tokens, check_ranges


@dataclass
class CriticConfig:
    """Configuration of the critic, for algorithms that need one, such as PPO. ``{}`` takes every default.

    Args:
        trunk: Model of its own trunk; by default a second copy of the policy's initial model.
        share_trunk: Put the value head on the policy's trunk instead: no second model, and the value loss trains the
            trunk as well.
        value_coefficient: With ``share_trunk``, the weight of the value loss beside the policy's.
        optimizer: Called with the critic's parameters; with ``share_trunk`` with those of the value head,
            while the policy's optimizer keeps the trunk. By default AdamW with a learning rate of 1e-5.
        lr_scheduler: Called with that optimizer; steps once per RL step.
        max_grad_norm: Clip its gradients to this global norm; ``null`` only measures it.
        num_epochs: Its passes over a step's completions; by default ``model.batch.num_epochs``. Not with
            ``share_trunk``.
        max_tokens_per_gpu: Tokens of its passes in an update; by default ``model.batch``'s. Not with ``share_trunk``.
        max_tokens_per_gpu_forward: The same where nothing is trained, by default twice.
        warmup_steps: RL steps at the start that train the critic alone.
        seed: Seed of the value head's initial weights; 0 follows ``seed_everything``.
    """

    trunk: ModelConfig | None = None
    share_trunk: bool = False
    value_coefficient: Positive = 0.5
    optimizer: OptimizerCallable | None = None
    lr_scheduler: LRSchedulerCallable | None = None
    max_grad_norm: Positive | None = 1.0
    num_epochs: Epochs | None = None
    max_tokens_per_gpu: Tokens | None = None
    max_tokens_per_gpu_forward: Tokens | None = None
    warmup_steps: Annotated[int, Range(0, 10_000_000)] = 0
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_ranges(self, "model.critic")
        if self.share_trunk and self.trunk is not None:
            raise ConfigError(
                "model.critic.share_trunk is true and model.critic.trunk names a model: remove one of the two."
            )
        for name in ("num_epochs", "max_tokens_per_gpu", "max_tokens_per_gpu_forward"):
            if self.share_trunk and (value := getattr(self, name)) is not None:
                raise ConfigError(
                    f"model.critic.{name} is {value} and model.critic.share_trunk true: on one trunk the critic learns "
                    "in the policy's own passes. Remove one of the two."
                )
        if not self.share_trunk and self.value_coefficient != type(self).value_coefficient:
            raise ConfigError(
                f"model.critic.value_coefficient is {self.value_coefficient} and model.critic.share_trunk false: the "
                "two losses are never added. Remove one of the two."
            )

    def trunk_source(self, policy: ModelConfig) -> tuple[ModelConfig, str]:
        """Return the model of the critic's own trunk, and the key that names it."""
        return (policy, "model.policy") if self.trunk is None else (self.trunk, "model.critic.trunk")

    def make_optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """Return the configured optimizer of ``parameters``, or the default one."""
        # no lambda as the field's default: jsonargparse cannot write one into the resolved configuration
        return (
            torch.optim.AdamW(parameters, lr=1e-5, fused=True) if self.optimizer is None else self.optimizer(parameters)
        )
