"""Trial of optimizers and schedulers, which check their options when they are made and used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from rlplug.errors import ConfigError

_WEIGHTS: Final = {"model.layers.0.mlp.weight": (2, 2), "model.norm.weight": (2,)}
_FORMS: Final = ("fused", "foreach")
"""Options of torch's optimizers that choose operators, some of which take no distributed tensors."""


def try_optimizer(
    prefix: str,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    make_scheduler: Callable[[Any], Any] | None,
    mesh: DeviceMesh,
    device: torch.device,
) -> None:
    """Make an optimizer and its scheduler for a tiny model, and take a step. Nothing is communicated.

    Args:
        prefix: Key of the block with ``optimizer`` and ``lr_scheduler``, such as ``model.``.
        make_optimizer: Makes the optimizer of named parameters.
        make_scheduler: Makes its scheduler; ``None`` for a constant rate.
        mesh: Mesh of the run, over which the tiny model is a distributed one, as the real model will be.
        device: Device of this rank.

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
            make_scheduler(optimizer)
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
