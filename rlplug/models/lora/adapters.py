"""Adapters in a network: what trains, its first values, and the network without them.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rlplug.distributed.mesh import local_part
from rlplug.errors import ConfigError
from rlplug.interfaces.optimization import Effect
from rlplug.interfaces.router_replay import named_routers
from rlplug.interfaces.trainer import ModelConfig
from rlplug.interfaces.weight_sync import AdapterWeights
from rlplug.models.forward import router_replay_of
from rlplug.models.lm_head import share_lm_head
from rlplug.models.loading import copy_part, empty_model
from rlplug.models.lora.config import LoRAConfig
from rlplug.models.lora.files import import_peft, load_folder, module_of
from rlplug.weight_sync.hf_names import adapter_modules, adapters_of, attach_adapters
from rlplug.weight_sync.low_rank import Adapters, LowRankUpdate

ADAPTER: Final = "default"
"""peft's name of the only adapter."""


def add_adapters(network: nn.Module, config: LoRAConfig, dtype: torch.dtype) -> Effect:
    """Put adapters into a network on the meta device, freeze all else, and keep what is frozen in ``dtype``.

    Raises:
        ConfigError: peft is missing, no layer has such a name, or a layer is none that can be adapted here.
    """
    peft = import_peft()
    total = sum(parameter.numel() for parameter in network.parameters())
    output: Any = network
    output_layer, targets, num_routers = output.get_output_embeddings(), config.targets, 0
    if targets == "all-linear":
        linear = {name for name, module in network.named_modules() if isinstance(module, nn.Linear | Conv1D)}
        routers = {name for name in linear if hasattr(network.get_submodule(name.rpartition(".")[0]), "experts")}
        num_routers = len(routers | named_routers(network).keys())
        targets = [name for name in sorted(linear - routers) if network.get_submodule(name) is not output_layer]
    options = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets)
    try:
        plain = nn.ModuleDict({"network": network})  # without a config, by which peft would adapt experts
        peft.inject_adapter_in_model(options, plain, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets is {config.targets}: {' '.join(str(error).split())}") from error
    if output.get_output_embeddings() is not output_layer:
        raise ConfigError("model.lora.targets names the output layer, whose logprobs are computed from its own weight.")
    adapters = _record(network, config)
    attach_adapters(network, adapters)
    for parameter in network.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    return Effect(
        f"LoRA of rank {config.rank} on {len(adapters.updates)} modules: {trained:,} parameters train, "
        f"{total:,} are frozen in {str(dtype).removeprefix('torch.')}"
        + f", {num_routers} routers among them"
        * bool(num_routers)
    )


def adapter_weights(policy: ModelConfig, config: LoRAConfig) -> AdapterWeights:
    """Return what an engine is told of adapters that it serves, without loading a weight.

    Raises:
        ConfigError: As for :func:`add_adapters`, or an adapter has no name in a checkpoint.
    """
    network = empty_model(policy)
    add_adapters(network, config, policy.torch_dtype)
    return AdapterWeights(config.rank, config.alpha, tuple(adapter_modules(network).values()))


@torch.no_grad()
def load_adapters(network: nn.Module, config: LoRAConfig) -> Effect:
    """Give the adapters of a sharded network their first values: drawn, or those of ``config.path``.

    Every rank draws all of A on the host, so that values depend neither on the ranks nor on the device.

    Raises:
        ConfigError: The folder holds no such adapter.
    """
    adapters = adapters_of(network)
    assert adapters is not None
    if config.path is not None:
        return load_folder(adapters, config)
    generator = torch.Generator().manual_seed(config.seed)
    for update in adapters.updates.values():
        down = update.down.weight
        bound = 1 / math.sqrt(down.shape[1])  # of kaiming_uniform_ with a = sqrt(5), which peft takes
        copy_part(down, torch.empty(down.shape).uniform_(-bound, bound, generator=generator))
        local_part(update.up.weight).zero_()
    return Effect(f"adapters drawn with seed {config.seed}: the policy starts as the frozen model")


class InitialPolicy(nn.Module):
    """A policy as it was when this was made: the reference, without a second copy of what is frozen.

    Adapters get their first values while it runs, or are switched off where those change nothing: ``is_base``.
    """

    def __init__(self, network: nn.Module, is_base: bool) -> None:
        super().__init__()
        self._network = [network]  # in a list: its parameters belong to the policy
        adapters: Any = adapters_of(network)
        self._layers: list[Any] = [network.get_submodule(module_of(name)) for name in adapters.updates]
        updates = () if is_base else adapters.updates.values()
        trained = [layer.weight for update in updates for layer in (update.down, update.up)]
        self._first = [(weight, local_part(weight).clone()) for weight in trained]
        share_lm_head(network, self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._network[0], name)

    def forward(self, **inputs: Any) -> Any:
        if (replay := router_replay_of(self._network[0])) is not None:
            replay.set(None)  # as in a reference of its own, routers decide
        with self._as_it_was():
            return self._network[0](**inputs)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Switch adapters off by the flag that peft's layers read: its own method also edits ``requires_grad``."""
        now = [local_part(weight).clone() for weight, _ in self._first]
        for layer in self._layers:
            layer._disable_adapters = not self._first
        for weight, value in self._first:
            local_part(weight).copy_(value)
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False
            for (weight, _), value in zip(self._first, now, strict=True):
                local_part(weight).copy_(value)


def _record(network: nn.Module, config: LoRAConfig) -> Adapters:
    updates, plain_names = {}, {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            continue
        plain_names[name] = name.replace(".base_layer.", ".")
        if name.endswith(".base_layer.weight"):
            layer: Any = network.get_submodule(module_of(name))
            if not isinstance(layer.base_layer, nn.Linear):
                raise ConfigError(
                    f"model.lora.targets names {module_of(name)}, which is "
                    f"{type(layer.base_layer).__name__}: rlplug adapts linear layers."
                )
            updates[name] = LowRankUpdate(layer.lora_A[ADAPTER], layer.lora_B[ADAPTER], config.scale)
    return Adapters(updates, plain_names)
