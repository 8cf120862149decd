"""Trainers of what the default trainer refuses: hybrids on packed rows, and other causal models on padded rows."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rlplug.errors import ConfigError
from rlplug.interfaces import Effect, ModelConfig, TrainerClaims, WeightsOfParameters
from rlplug.models.attention import NAME
from rlplug.models.loading import empty_model
from rlplug.models.transformers_trainer import TransformersTrainer
from rlplug.types import MeshSizes
from rlplug.weight_sync.hf_names import adapters_of
from rlplug_hybrids.borders import keep_apart
from rlplug_hybrids.decays import keep_float32, own_name, under_own_names
from rlplug_hybrids.kernel_compilers import compile_side_by_side, trace_convolutions
from rlplug_hybrids.layers import (
    compute_in_torch,
    kernels_of,
    read_weights,
    stateful_layers,
    takes_borders,
    without_kernels,
)
from rlplug_hybrids.rows import pad_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
"""Distributions of packages with kernels."""
LEAKS = "leaks each packed sequence into the next"
AHEAD = "is not causal, or mixes the rows of a batch"
"""What a leak is between padded rows."""


class _StatefulTrainer(TransformersTrainer):
    """Keeps the decays of layers with a state in float32, and their kernels off the CPU."""

    def split(self, network: nn.Module, mesh: DeviceMesh) -> Mapping[nn.Module, DeviceMesh]:
        keep_float32(network, mesh)
        return super().split(network, mesh)

    def load_weights(self, network: nn.Module, config: ModelConfig, key: str) -> Effect:
        with under_own_names(network):
            layers = stateful_layers(network)
            refuse_lost_adapters(network, layers)
            loaded = super().load_weights(network, config, key)
        tuning = ""
        if next(network.parameters()).device.type == "cpu":
            compute_in_torch(layers.values())
        elif any(takes_borders(layer) for layer in layers.values()):
            trace_convolutions(layers.values())
            if not compile_side_by_side():
                tuning = "; a first run tunes kernels for minutes, as this Triton compiles one candidate after another"
        return Effect(f"{loaded.description}; {self.way(layers)}{tuning}")

    def way(self, layers: Mapping[str, nn.Module]) -> str:
        """Return how sequences are kept apart, as part of a sentence."""
        raise NotImplementedError

    def hf_weights(self, network: nn.Module) -> WeightsOfParameters:
        with under_own_names(network):
            weights = super().hf_weights(network)
        return {name: weights[own_name(name)] for name, _ in network.named_parameters()}


class HybridTrainer(_StatefulTrainer):
    """Train transformers' hybrid models, some of whose layers have a state.

    Such layers, gated delta nets, Mamba and short convolutions among them, are found by their structure. Where all of a
    layer's kernels are installed and take the borders of sequences, it gets them; elsewhere it gets each sequence of a
    packed row as a row of its own, padded to the longest. All else is as with the default trainer. A model whose
    sequences would still mix is refused at start.
    """

    claims = TrainerClaims(
        axes=frozenset({"replicate"}),
        critic=True,
        lora=True,
        router_replay=True,
    )

    def check(self, config: ModelConfig, key: str, mesh: MeshSizes) -> None:
        layers = stateful_layers(empty_model(config, key)).values()
        try:
            with without_kernels(layers):
                super().check(config, key, mesh)
        except ConfigError as error:
            raise ConfigError(with_remedy(str(error), "Set model.trainer to PaddedTrainer.")) from error
        conflicts = {}
        for layer in layers:
            name = type(layer).__name__
            if takes_borders(layer):
                reason = f"nothing could be compiled around {name}'s kernels: take GradientCheckpointing"
                conflicts["SelectiveCheckpointing"] = reason
            else:
                reason = f"{name}, without kernels that take borders, gets another shape in each pass"
                conflicts["CompileBlocks"] = reason
        self.claims = replace(self.claims, conflicts=conflicts)

    def edit(self, network: PreTrainedModel) -> None:
        keep_apart(network)

    def way(self, layers: Mapping[str, nn.Module]) -> str:
        ways = Counter(way_of(layer) for layer in layers.values())
        return ", ".join(f"{count} {way}" for way, count in ways.items()) or "no layer has a state"


class PaddedTrainer(_StatefulTrainer):
    """Train causal models of transformers that cannot be packed, on padded rows.

    The whole model gets a batch with one row for each sequence, padded to the longest, and computes it with its own
    attention: ``sdpa`` where it has it, else ``eager``. So Mamba, biases of scores by position and sparse attention
    need nothing of packing, and a step takes S x T tokens for N. A model that is not causal is refused at start.
    """

    claims = TrainerClaims(
        axes=frozenset({"replicate"}),
        critic=True,
        attention=frozenset({NAME}),
        lora=True,
        conflicts={
            "CompileBlocks": "padded rows have another shape in each pass",
            "FlashAttention4": "PaddedTrainer uses the model's own attention",
        },
    )

    def check(self, config: ModelConfig, key: str, mesh: MeshSizes) -> None:
        try:
            with without_kernels(stateful_layers(empty_model(config, key)).values()):
                _AheadTrainer().check(config, key, mesh)
        except ConfigError as error:
            message = with_remedy(str(error), "Use another model.")
            own, looks_ahead, _ = message.partition(LEAKS)
            raise ConfigError(f"{own}{AHEAD}. Use another model." if looks_ahead else message) from error

    def edit(self, network: PreTrainedModel) -> None:
        pad_rows(network)

    def way(self, layers: Mapping[str, nn.Module]) -> str:
        return "a padded row for each sequence"


class _AheadTrainer(TransformersTrainer):
    """Pads further, so that every sequence has tokens of others behind it, by which a check sees who looks ahead."""

    def edit(self, network: PreTrainedModel) -> None:
        pad_rows(network, ahead=8)


def with_remedy(message: str, remedy: str) -> str:
    """Return a refusal of the default trainer with another remedy in place of its own, where it names trainers."""
    problem, trainers, _ = message.partition(" Set model.trainer to")
    return f"{problem} {remedy}" if trainers else message


def way_of(layer: nn.Module) -> str:
    """Return how a layer keeps sequences apart, as part of a sentence."""
    name = type(layer).__name__
    if takes_borders(layer):
        return f"{name} by the borders that their kernels take"
    missing = []
    for package in sorted({kernel.package for kernel in kernels_of(type(layer)) if not kernel.is_used}):
        own = DISTRIBUTIONS.get(package, package)
        missing.append(f"the kernels of {own}, which do not run here" if package in sys.modules else own)
    slow = f", slow without {' and '.join(missing)}" if missing else ""
    return f"{name} by a padded row for each sequence{slow}"


def refuse_lost_adapters(network: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Refuse adapters on modules whose weight a layer reads without calling them.

    Raises:
        ConfigError: There are some; the message names one.
    """
    adapters = adapters_of(network)
    adapted = () if adapters is None else tuple(adapters.updates)
    for name, layer in layers.items():
        lost = sorted(part for part in read_weights(layer) if any(a.startswith(f"{name}.{part}.") for a in adapted))
        if lost:
            raise ConfigError(
                f"model.lora.targets has {lost[0]}, whose weight {type(layer).__name__} reads itself, so that its "
                "adapter would add nothing: list the others, without it."
            )
