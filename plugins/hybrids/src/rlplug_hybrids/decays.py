"""Decays of layers with a state, which stay float32 in passes that cast all other weights to bfloat16.

A decay is the product of a whole sequence's factors, so that rounding it changes what a layer remembers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rlplug.distributed.mesh import weights_mesh
from rlplug.weight_sync.hf_names import DECAYS
from rlplug_hybrids.layers import block_of, stateful_layers

OWN_UNIT: Final = "in_float32"
"""Name of the module of a layer that has its decays, as an FSDP unit casts all of its parameters alike."""
IN_FLOAT32: Final = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)


class _Decays(nn.Module):
    """FSDP unit of the decays of one module."""

    def forward(self) -> dict[str, Tensor]:
        """Return copies, since FSDP frees what it gathers."""
        return {name: decay.clone() for name, decay in self.named_parameters()}


def keep_float32(network: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the decays of a network on the meta device on their own, in float32, and let its layers read them."""
    for name, layer in stateful_layers(network).items():
        owners = [module for module in layer.modules() if module._parameters.keys() & {*DECAYS}]
        for owner in owners:
            block_of(network, name).register_forward_pre_hook(partial(_read, owner, _shard(owner, mesh)))


def _shard(owner: nn.Module, mesh: DeviceMesh) -> nn.Module:
    unit = _Decays()
    for name in DECAYS:
        decay = owner._parameters.pop(name, None)
        if decay is not None:
            unit.register_parameter(name, nn.Parameter(decay.detach().float(), decay.requires_grad))
    owner.add_module(OWN_UNIT, unit)
    fully_shard(unit, mesh=weights_mesh(mesh), mp_policy=IN_FLOAT32, reshard_after_forward=False)
    return unit


def _read(owner: nn.Module, unit: nn.Module, block: nn.Module, args: Any) -> None:
    """Give a module its decays, as attributes, before its block computes.

    A hook of the block, since what CompileBlocks compiles is the forward method of a block, and no unit of FSDP can be
    called in it. They stay after the pass: what recomputes a block in the backward pass calls that method alone.
    """
    vars(owner).update(unit())


@contextmanager
def under_own_names(network: nn.Module) -> Iterator[None]:
    """Let the parameters of a network have the names that they have in checkpoints, for what copies into them."""
    units = [(owner, owner._modules.pop(OWN_UNIT)) for owner in [*network.modules()] if OWN_UNIT in owner._modules]
    for owner, unit in units:
        for name in unit._parameters:  # type: ignore[union-attr]
            vars(owner).pop(name, None)  # of a pass before, which would hide the parameter
        owner._parameters.update(unit._parameters)  # type: ignore[union-attr]
    try:
        yield
    finally:
        for owner, unit in units:
            for name in unit._parameters:  # type: ignore[union-attr]
                del owner._parameters[name]
            owner._modules[OWN_UNIT] = unit


def own_name(name: str) -> str:
    """Return the name under which a parameter of a network with such units is in checkpoints."""
    return name.replace(f"{OWN_UNIT}.", "")
