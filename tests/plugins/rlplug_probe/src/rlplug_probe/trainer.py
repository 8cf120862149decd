"""A trainer of transformers' models that says so."""

from __future__ import annotations

from torch import nn

from rlplug.interfaces import Effect, ModelConfig
from rlplug.models.transformers_trainer import TransformersTrainer


class ProbeTrainer(TransformersTrainer):
    """Transformers' models; the effect of their loading names the probe."""

    def load_weights(self, network: nn.Module, config: ModelConfig, key: str) -> Effect:
        return Effect(f"the probe's trainer: {super().load_weights(network, config, key).description}")
