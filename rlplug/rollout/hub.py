"""A model's weights as checkpoints hold them: what transformers keeps in one tensor for all experts is many there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from rlplug.errors import ConfigError


@dataclass(frozen=True)
class HubWeight:
    """A tensor of a checkpoint: a parameter, or rows of one expert's matrix in a parameter [E, O, I]."""

    name: str
    shape: torch.Size
    expert: int | None = None
    """Index among the parameter's; ``None`` for a whole parameter."""
    first_row: int = 0
    """In that expert's matrix."""

    def of(self, parameter: Tensor) -> Tensor:
        """Return it as a view of the parameter, unsharded."""
        if self.expert is None:
            return parameter
        return parameter[self.expert, self.first_row : self.first_row + self.shape[0]]

    def scales_of(self, scales: Tensor, block: int) -> Tensor:
        """Return its part of the scales of such a parameter, which has one for each ``block`` rows of an expert."""
        if self.expert is None:
            return scales
        return scales[self.expert, self.first_row // block : (self.first_row + self.shape[0]) // block]


_known: WeakKeyDictionary[nn.Module, dict[str, tuple[HubWeight, ...]]] = WeakKeyDictionary()
"""What was found of a model: each sync asks for it."""


def hub_weights(model: nn.Module) -> Mapping[str, tuple[HubWeight, ...]]:
    """Return what each parameter of ``model`` is in a checkpoint of the hub, by the parameter's name.

    That is what engines load: ``experts.gate_up_proj`` [E, 2 O, I] of Qwen3-MoE is ``experts.0.gate_proj.weight``
    [O, I] and 2 E - 1 more. transformers knows how it converted the names of a checkpoint, and back.

    Args:
        model: Of transformers, or any module, whose names are then kept; sharded or not, or on the meta device.

    Raises:
        ConfigError: transformers converts a weight in a way that is neither a new name nor a stack of matrices.
    """
    if model not in _known:
        _known[model] = dict(_found(model))
    return _known[model]


def hub_views(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of an unsharded model by their names in a checkpoint, as views of its parameters."""
    weights = hub_weights(model)
    return {
        weight.name: weight.of(parameter.detach())
        for name, parameter in model.named_parameters()
        for weight in weights[name]
    }


def _found(model: nn.Module) -> Iterator[tuple[str, tuple[HubWeight, ...]]]:
    seen: set[str] = set()
    is_converted = isinstance(model, PreTrainedModel) and bool(get_model_conversion_mapping(model, add_legacy=False))
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        found = tuple(_of_parameter(model, name, shape)) if is_converted else (HubWeight(name, shape),)
        names = {weight.name for weight in found}
        if names & seen or sum(weight.shape.numel() for weight in found) != shape.numel():
            raise _unknown(name, shape)
        seen |= names
        yield name, found


def _of_parameter(model: Any, name: str, shape: torch.Size) -> Iterator[HubWeight]:
    """Have transformers convert the shape alone, and then the numbers of all experts' rows."""
    shapes = revert_weight_conversion(model, {name: torch.empty(shape, device="meta")})
    if len(shapes) == 1:
        (hub_name,) = shapes
        yield HubWeight(hub_name, shape)
        return
    num_experts, num_rows = shape[:2]
    numbers = torch.arange(num_experts * num_rows).view(num_experts, num_rows, 1).expand(-1, -1, 2)  # 1 is squeezed
    for hub_name, numbered in revert_weight_conversion(model, {name: numbers}).items():
        expert, first = divmod(int(numbered[0, 0]), num_rows)
        weight = HubWeight(hub_name, shapes[hub_name].shape, expert, first)
        if len(shape) != 3 or not torch.equal(numbered, weight.of(numbers)):
            raise _unknown(name, shape)
        yield weight


def _unknown(name: str, shape: torch.Size) -> ConfigError:
    return ConfigError(
        f"model.policy: transformers makes {name} {list(shape)} of a checkpoint's weights in a way that rlplug cannot "
        "undo, so no engine could be sent it. Experts whose matrices lie one behind the other are known."
    )
