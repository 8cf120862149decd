"""Builds the models of a run: on the meta device first, then edited, sharded, and loaded with weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlplug.errors import ConfigError, brief
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.process_state import watched
from rlplug.interfaces.optimization import Effect, Network, Optimization
from rlplug.models.loading import to_empty_on

if TYPE_CHECKING:
    from rlplug.distributed.strategy import RLFSDP2Strategy
    from rlplug.interfaces.trainer import ModelConfig, ModelTrainer
    from rlplug.models.lora.config import LoRAConfig


class Models(nn.Module):
    """The sharded models of a run; its parameters are what a checkpoint holds."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.critic: nn.Module | None = None
        """A ``Critic``, or with a shared trunk a ``ValueHead``."""
        self.effects: list[Effect] = []
        """How weights came and what the optimizations changed."""
        self.adapters: dict[str, float] | None = None
        """What tells the policy's adapters and their base from others; ``None`` where all of it trains."""
        self._reference: list[nn.Module] = []  # in a list, so that it is not part of the checkpoint

    @property
    def reference(self) -> nn.Module | None:
        """The frozen reference policy, where the algorithm needs one."""
        return self._reference[0] if self._reference else None

    def set_reference(self, model: nn.Module) -> None:
        self._reference = [model]


def build_policy(
    config: ModelConfig,
    optimizations: Sequence[Optimization],
    strategy: RLFSDP2Strategy,
    trainer: ModelTrainer,
    router_replay: bool = False,
    lora: LoRAConfig | None = None,
) -> tuple[nn.Module, list[Effect]]:
    """Return the sharded policy, and effects: how its weights were loaded and what the optimizations changed.

    Raises:
        ConfigError: The model cannot be loaded or sharded, or an optimization took no effect.
    """
    key = "model.policy"
    policy = empty_network(trainer, config, key)
    if router_replay:
        from rlplug.models.forward import attach_router_replay

        attach_router_replay(policy, trainer.router_replay(policy))
    effects: list[Effect] = []
    if lora is not None:
        from rlplug.models.lora.adapters import add_adapters, load_adapters

        effects.append(add_adapters(policy, lora, config.torch_dtype))
    effects += edit_and_shard("policy", policy, config, optimizations, strategy, trainer)
    loaded = trainer.load_weights(policy, config, key)
    if lora is None:
        return policy, [of_start(loaded), *effects]
    return policy, [loaded, *effects, of_start(load_adapters(policy, lora))]


def build_reference(
    config: ModelConfig | None,
    policy: ModelConfig,
    optimizations: Sequence[Optimization],
    strategy: RLFSDP2Strategy,
    trainer: ModelTrainer,
) -> tuple[nn.Module, list[Effect]]:
    """Return the frozen reference policy, ``config`` or the policy's initial model, and its effects."""
    chosen, key = (policy, "model.policy") if config is None else (config, "model.reference")
    reference = empty_network(trainer, chosen, key)
    effects = edit_and_shard("reference", reference, chosen, optimizations, strategy, trainer)
    effects = [trainer.load_weights(reference, chosen, key), *effects]
    return reference.requires_grad_(False).eval(), of_network("reference", effects)


def empty_network(trainer: ModelTrainer, config: ModelConfig, key: str) -> nn.Module:
    """Return the trainer's network on the meta device, after a check that it is one."""
    call = PluginCall(trainer, "empty_network")
    with watched(call):
        return check_network(call, trainer.empty_network(config, key))


def edit_and_shard(
    network: Network,
    model: nn.Module,
    config: ModelConfig,
    optimizations: Sequence[Optimization],
    strategy: RLFSDP2Strategy,
    trainer: ModelTrainer,
    trunk: nn.Module | None = None,
) -> list[Effect]:
    """Edit an empty model, which ``trainer`` built, or its ``trunk``; shard it, and allocate its memory."""
    chosen = [copy.deepcopy(optimization) for optimization in optimizations if network in optimization.applies_to]
    for optimization in chosen:
        with watched(PluginCall(optimization, "before_shard")):
            optimization.before_shard(model)
    built = model if trunk is None else trunk
    meshes = trainer.split(built, strategy.mesh)
    strategy.shard(model, config.torch_dtype, trainer.fsdp_units(built), meshes)
    to_empty_on(model, strategy.root_device)
    effects: list[Effect] = []
    for optimization in chosen:
        with watched(PluginCall(optimization, "after_shard")):
            optimization.after_shard(model)
        found = check_effects(PluginCall(optimization, "effects"), optimization.effects())
        if not found:
            raise ConfigError(
                f"{type(optimization).__name__} took no effect on the {network}, {config.path}: remove it from "
                "model.optimizations."
            )
        effects += found
    return effects


def of_network(network: Network, effects: Sequence[Effect]) -> list[Effect]:
    """Return effects with the name of their network."""
    return [dataclasses.replace(effect, description=f"{network}: {effect.description}") for effect in effects]


def of_start(loaded: Effect) -> Effect:
    """Return the effect of giving weights their first values, as one that a checkpoint ends."""
    return dataclasses.replace(loaded, is_of_start=True)


# ---- what plugins return ------------------------------------------------------------------------------------------


def check_network(call: PluginCall, network: Any) -> nn.Module:
    """Return the network that a trainer built: a module whose parameters are float32 and on the meta device."""
    if not isinstance(network, nn.Module):
        raise call.violation("return a torch.nn.Module", f"returned {brief(network)}")
    for name, parameter in network.named_parameters():
        if parameter.dtype != torch.float32 or not parameter.is_meta:
            came = f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"
            raise call.violation("return float32 parameters on the meta device", f"returned {name} as {came}")
    return network


def check_effects(call: PluginCall, effects: Any) -> list[Effect]:
    """Return what an optimization says that it changed."""
    if not isinstance(effects, list | tuple) or not all(
        isinstance(each, Effect) and isinstance(each.description, str) and each.description for each in effects
    ):
        raise call.violation("return a list of Effect, each with a description", f"returned {brief(effects)}")
    return list(effects)
