"""Trainers with a mistake each; a module of its own, because ranks import it. ``broken_trainer_checks.py`` checks them.

Mistakes that have to do with different checks share a trainer, so that there are fewer to build.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hasty_trainers
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from rlplug.distributed.mesh import local_part, local_slices
from rlplug.errors import ConfigError
from rlplug.interfaces import TrainerClaims
from rlplug.models.transformers_trainer import TransformersTrainer

# ---- passes -------------------------------------------------------------------------------------------------------


class LeaksBetweenSequences(TransformersTrainer):
    """Attends to the whole row."""

    def empty_network(self, config, key):
        def one_sequence(network, args, inputs):
            length = inputs["input_ids"].shape[1]
            borders = torch.tensor([0, length], dtype=torch.int32)
            lengths = {"max_length_q": length, "max_length_k": length}
            return args, inputs | {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders} | lengths

        network = super().empty_network(config, key)
        network.register_forward_pre_hook(one_sequence, with_kwargs=True)
        return network


class TrainsThePadding(TransformersTrainer):
    def empty_network(self, config, key):
        network: Any = super().empty_network(config, key)
        network.get_input_embeddings().padding_idx = None
        return network


class AveragesOverTokens(TransformersTrainer):
    """Divides gradients by the number of tokens of the micro-batch."""

    def empty_network(self, config, key):
        def average(network, inputs, output):
            if output.logits.requires_grad:
                output.logits.register_hook(lambda gradient: gradient / gradient.shape[1])

        network = super().empty_network(config, key)
        network.register_forward_hook(average)
        return network


class ReturnsACopyOfLogits(TransformersTrainer):
    def empty_network(self, config, key):
        def copied(network, inputs, output):
            return dataclasses.replace(output, logits=output.logits.clone())

        network = super().empty_network(config, key)
        network.register_forward_hook(copied)
        return network


class KeepsPartialGradients(TransformersTrainer):
    """Leaves the sum over ranks to whoever reads a gradient, so that a norm is each rank's own."""

    def load_weights(self, network, config, key):
        def make_partial(parameter):
            gradient = parameter.grad
            if gradient.device_mesh.size() > 1:
                mine = torch.zeros(gradient.shape)
                mine[local_slices(gradient)] = gradient.to_local()
                parameter.grad = DTensor.from_local(mine, gradient.device_mesh, [Partial()], run_check=False)

        effect = super().load_weights(network, config, key)
        if next(network.parameters()).device_mesh.ndim == 1:
            for parameter in network.parameters():
                parameter.register_post_accumulate_grad_hook(make_partial)
        return effect


# ---- weights ------------------------------------------------------------------------------------------------------


class DropsAName(TransformersTrainer):
    def hf_weights(self, network):
        return {**super().hf_weights(network), "model.layers.1.mlp.up_proj.weight": ()}


class SendsTiedEndsTwice(TransformersTrainer):
    def hf_weights(self, network):
        weights = dict(super().hf_weights(network))
        (embeddings,) = weights["model.embed_tokens.weight"]
        twice = (embeddings, dataclasses.replace(embeddings, name="lm_head.weight"))
        return weights | {"model.embed_tokens.weight": twice}


class SwapsKeysAndValues(TransformersTrainer):
    def hf_weights(self, network):
        weights = super().hf_weights(network)
        other = {"k_proj": "v_proj", "v_proj": "k_proj"}
        return {name: weights[".".join(other.get(part, part) for part in name.split("."))] for name in weights}


class SwapsKeysAndValuesBothWays(SwapsKeysAndValues):
    """Loads them swapped too, so that what it sends is right."""

    def load_weights(self, network, config, key):
        effect = super().load_weights(network, config, key)
        for layer in network.model.layers:
            key_part, value_part = (local_part(getattr(layer.self_attn, name).weight) for name in ("k_proj", "v_proj"))
            former = key_part.clone()
            key_part.copy_(value_part)
            value_part.copy_(former)
        return effect


class PermutesRowsOfQueries(TransformersTrainer):
    """Converts as for a library that pairs rotary dimensions otherwise, and loads without it."""

    def hf_weights(self, network):
        def permuted(whole):
            return whole.view(4, 4, 2, -1).transpose(1, 2).reshape(whole.shape)

        return {
            name: tuple(dataclasses.replace(weight, convert=permuted if "q_proj" in name else None) for weight in each)
            for name, each in super().hf_weights(network).items()
        }


class DrawsOtherWeights(TransformersTrainer):
    def load_weights(self, network, config, key):
        return super().load_weights(network, dataclasses.replace(config, seed=config.seed + 1), key)


# ---- folders ------------------------------------------------------------------------------------------------------


class ExportsTheTrunk(TransformersTrainer):
    def architecture(self, network):
        return "LlamaModel"


class LosesTheGenerationConfig(TransformersTrainer):
    def empty_network(self, config, key):
        network: Any = super().empty_network(config, key)
        network.generation_config = type(network.generation_config)()
        return network


class ForgetsOnResume(TransformersTrainer):
    """Counts its passes in a number that no checkpoint holds."""

    def empty_network(self, config, key):
        def scale(network, inputs, output):
            if output.logits.requires_grad:
                network.num_passes += 1
                factor = 1 + 1e-6 * network.num_passes
                output.logits.register_hook(lambda gradient: gradient * factor)

        network: Any = super().empty_network(config, key)
        network.num_passes = 0
        network.register_forward_hook(scale)
        return network


# ---- networks and refusals ----------------------------------------------------------------------------------------


class BuildsOnTheHost(TransformersTrainer):
    def empty_network(self, config, key):
        return super().empty_network(config, key).to_empty(device="cpu")


class GathersEverythingAtOnce(TransformersTrainer):
    def fsdp_units(self, network):
        return []


class MovesTheGlobalGenerator(TransformersTrainer):
    def load_weights(self, network, config, key):
        torch.rand(1)
        return super().load_weights(network, config, key)


class AcceptsAnyModel(TransformersTrainer):
    """Last in a mixture: networks of others are edited."""

    def check(self, config, key, mesh):
        pass

    def empty_network(self, config, key):
        try:
            return super().empty_network(config, key)
        except ConfigError:
            return nn.Linear(2, 2)


class RefusesItsModels(TransformersTrainer):
    def check(self, config, key, *sizes):
        raise ConfigError(f"{key}.path {config.path!r}: not today.")


class MisspellsAnAxis(TransformersTrainer):
    claims = TrainerClaims(axes=frozenset({"tensors"}))


class SplitsNothing(TransformersTrainer):
    """Claims the tensor axis, where each of its ranks keeps all."""

    claims = TrainerClaims(axes=frozenset({"tensor", "replicate"}))

    def split(self, network, mesh):
        return {}


class RefusesReplicas(TransformersTrainer):
    """Claims the axis, and builds nothing on it."""

    def load_weights(self, network, config, key):
        if next(network.parameters()).device_mesh.ndim > 1:
            raise ConfigError("trainer.strategy.init_args.replicate is 2: set it to 1.")
        return super().load_weights(network, config, key)


# ---- mixtures, by name, because ranks unpickle them -----------------------------------------------------------------


class Careless(
    hasty_trainers.KeepsBordersByLength,
    hasty_trainers.CutsLongRows,
    hasty_trainers.KeepsOutputs,
    hasty_trainers.WritesBesideTheWeights,
    ReturnsACopyOfLogits,
    DrawsOtherWeights,
    ExportsTheTrunk,
    ForgetsOnResume,
    GathersEverythingAtOnce,
    MovesTheGlobalGenerator,
    AcceptsAnyModel,
):
    """Makes mistakes that a single rank shows."""


class CarelessOnRanks(KeepsPartialGradients, SplitsNothing, RefusesReplicas):
    """Makes mistakes that only several ranks show."""


class Closed(RefusesItsModels, MisspellsAnAxis):
    """Refuses and claims the wrong things."""
