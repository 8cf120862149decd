"""What trainers and optimizations return."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlplug.errors import brief
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.optimization import Effect


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
