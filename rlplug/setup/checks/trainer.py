"""Checks of the trainer's claims, of optimizers, and of optimizations that do not go together.

Each raises a ``ConfigError`` that names the key, the reason and the fix.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Set
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rlplug.config import RunConfig
from rlplug.errors import ConfigError
from rlplug.interfaces.optimization import Optimization
from rlplug.types import MeshSizes

_WEIGHTS: Final = {"model.layers.0.mlp.weight": (2, 2), "model.norm.weight": (2,)}
_FORMS: Final = ("fused", "foreach")
"""Options of torch's optimizers that choose operators, some of which take no distributed tensors."""


def check_trainer(config: RunConfig, mesh: MeshSizes, policy_alone: bool = False) -> None:
    """Refuse a run that needs more than its trainer claims, and models that the trainer cannot build."""
    trainer, name = config.model_trainer, type(config.model_trainer).__name__
    claims, instead = trainer.claims, "or remove model.trainer to train the models of transformers"
    for axis in ("replicate", "sequence", "tensor"):
        if getattr(mesh, axis) > 1 and axis not in claims.axes:
            raise ConfigError(
                f"trainer.strategy.init_args.{axis} is {getattr(mesh, axis)}, which {name} does not support: set it to "
                f"1, {instead}."
            )
    if config.router_replay and not claims.router_replay:
        raise ConfigError(f"model.router_replay is true, and {name} cannot replay experts: remove it, {instead}.")
    if config.lora is not None and not claims.lora:
        raise ConfigError(f"model.lora is set, and {name} has no adapters: remove it, {instead}.")
    if config.lora is not None and mesh.tensor > 1:
        raise ConfigError(
            f"model.lora is set, and trainer.strategy.init_args.tensor is {mesh.tensor}: adapters are not split over "
            "the tensor axis. Set it to 1; FSDP shards over the same ranks."
        )
    if config.critic is not None and not claims.critic:
        raise ConfigError(f"model.critic is set, and {name} trains no critic: remove it, {instead}.")
    trunk = None if config.critic is None else config.critic.trunk
    models = {"model.policy": config.policy, "model.reference": config.reference, "model.critic.trunk": trunk}
    for key, model in models.items():
        if model is None or (policy_alone and key != "model.policy"):
            continue
        if claims.attention is not None and model.attn_implementation not in claims.attention:
            raise ConfigError(
                f"{key}.attn_implementation is {model.attn_implementation!r}, which {name} does not have: give "
                f"{' or '.join(sorted(claims.attention))}."
            )
        trainer.check(model, key, mesh)
    for optimization in (type(optimization).__name__ for optimization in config.optimizations):
        if claims.optimizations is not None and optimization not in claims.optimizations:
            known = ", ".join(sorted(claims.optimizations)) or "none"
            raise ConfigError(
                f"model.optimizations has {optimization}, which does not work on the models of {name}: remove it, "
                f"{instead}. Those that work: {known}."
            )
        if reason := trainer.claims.conflicts.get(optimization):  # of these models, which the trainer has checked
            raise ConfigError(f"model.optimizations has {optimization}, and {reason}: remove one of the two.")


def check_optimizers(config: RunConfig, mesh: DeviceMesh, device: torch.device) -> None:
    """Try the optimizers and schedulers of policy and critic on a tiny model."""
    try_optimizer("model.", config.optimizer, config.lr_scheduler, mesh, device)
    if config.critic is not None and config.critic.optimizer is not None:
        try_optimizer("model.critic.", config.critic.optimizer, config.critic.lr_scheduler, mesh, device)


def try_optimizer(
    prefix: str,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    make_scheduler: Callable[[Any], Any] | None,
    mesh: DeviceMesh,
    device: torch.device,
) -> None:
    """Make an optimizer and its scheduler for a tiny model, and step both. Nothing is communicated.

    The model is distributed over the run's ``mesh``, as the real one will be. ``prefix`` is the key of the block with
    ``optimizer`` and ``lr_scheduler``, such as ``model.``; a constant rate has no scheduler.

    Raises:
        ConfigError: One of them refuses its options; the message names the key and the reason.
    """
    placements = [Replicate()] * mesh.ndim
    named = []
    for name, size in _WEIGHTS.items():
        weight = DTensor.from_local(torch.zeros(size, device=device), mesh, placements, run_check=False)
        parameter = torch.nn.Parameter(weight)
        parameter.grad = torch.zeros_like(parameter)
        named.append((name, parameter))
    key, optimizer = f"{prefix}optimizer", None
    try:
        optimizer = make_optimizer(named)
        optimizer.step()
        key = f"{prefix}lr_scheduler"
        if make_scheduler is not None:
            scheduler = make_scheduler(optimizer)
            if isinstance(scheduler, ReduceLROnPlateau):
                raise ConfigError(f"{key} is ReduceLROnPlateau, which waits for a metric: give a schedule of steps.")
            optimizer.step()
            scheduler.step()
    except ConfigError:
        raise
    except NotImplementedError as error:
        forms = [] if optimizer is None else [name for name in _FORMS if optimizer.defaults.get(name)]
        if not forms:
            raise _refusal(key, error) from error
        raise ConfigError(
            f"{key}.init_args.{forms[0]} is true, and {type(optimizer).__name__} has no such step for sharded models: "
            "remove it."
        ) from error
    except Exception as error:
        raise _refusal(key, error) from error


def _refusal(key: str, error: Exception) -> ConfigError:
    return ConfigError(f"{key} refuses its options: {' '.join(str(error).split())[:300]}. Correct them.")


def check_optimizations(optimizations: Sequence[Optimization], networks: Set[str]) -> None:
    """Refuse an optimization of none of the run's ``networks``, and two that one of them cannot have together."""
    for each in optimizations:
        if not networks & {*each.applies_to}:
            raise ConfigError(f"model.optimizations has {type(each).__name__} for no model of the run: remove it.")
    for first, second in itertools.combinations(optimizations, 2):
        names = (type(first).__name__, type(second).__name__)
        reason = first.conflicts.get(names[1]) or second.conflicts.get(names[0])
        shares = {*first.applies_to} & {*second.applies_to}
        if shares and type(first) is type(second):
            raise ConfigError(f"model.optimizations has {names[0]} twice: remove one.")
        if shares and reason is not None:
            problem = f"{names[0]} and {names[1]}, which do not go together: {reason}"
            raise ConfigError(f"model.optimizations has {problem}. Remove one of the two.")
