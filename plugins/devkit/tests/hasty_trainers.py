"""Trainers with what authors write in haste, in long or other rows and in files; ranks import the module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rlplug.models.transformers_trainer import TransformersTrainer


class KeepsItsDropout(TransformersTrainer):
    """That of the model's configuration."""

    def empty_network(self, config, key):
        share = json.loads(Path(config.path, "config.json").read_text())["attention_dropout"]

        def drop(module, inputs, output):
            return torch.nn.functional.dropout(output, share, training=torch.is_grad_enabled())

        network: Any = super().empty_network(config, key)
        for layer in network.model.layers:
            layer.self_attn.o_proj.register_forward_hook(drop)
        return network


class KeepsBordersByLength(TransformersTrainer):
    """Makes a mask once for each length of a row."""

    def empty_network(self, config, key):
        kept: dict[int, dict[str, Any]] = {}

        def first_borders(network, args, inputs):
            names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
            own = kept.setdefault(inputs["input_ids"].shape[1], {name: inputs[name] for name in names})
            return args, inputs | own

        network = super().empty_network(config, key)
        network.register_forward_pre_hook(first_borders, with_kwargs=True)
        return network


class CutsLongRows(TransformersTrainer):
    """Scales what comes behind a limit that it has for rows."""

    def empty_network(self, config, key):
        def cut(network, inputs, output):
            if output.logits.shape[1] > 64:
                output.logits.data[:, 64:] *= 0.9

        network = super().empty_network(config, key)
        network.register_forward_hook(cut)
        return network


class KeepsOutputs(TransformersTrainer):
    """In a list that grows by the logits of each pass."""

    def empty_network(self, config, key):
        kept: list[torch.Tensor] = []

        def keep(network, inputs, output):
            kept.append(output.logits.detach())

        network = super().empty_network(config, key)
        network.register_forward_hook(keep)
        return network


class WritesBesideTheWeights(TransformersTrainer):
    """What it has converted, into the model's folder."""

    def load_weights(self, network, config, key):
        Path(config.path, "converted.json").write_text("{}")
        return super().load_weights(network, config, key)
