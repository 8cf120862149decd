"""A model's weights as checkpoints hold them: what transformers keeps in one tensor for all experts is many there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from rlplug.errors import ConfigError


@dataclass(frozen=True)
class HFWeight:
    """A tensor of a checkpoint: a parameter, or some of its rows, such as one expert's matrix of a parameter [E, O, I].

    Rows are all but the last dimension, counted through.
    """

    name: str
    shape: torch.Size
    first_row: int | None = None
    """In the parameter; ``None`` for all of it."""

    @property
    def num_rows(self) -> int:
        return self.shape[:-1].numel()

    def of(self, parameter: Tensor) -> Tensor:
        """Return it as a view of the parameter, unsharded."""
        if self.first_row is None:
            return parameter
        rows = parameter.flatten(0, -2)[self.first_row : self.first_row + self.num_rows]
        return rows.view(*self.shape[:-1], -1)

    def scales_of(self, scales: Tensor, block: int) -> Tensor:
        """Return its part of the parameter's scales, one for each ``block`` rows."""
        if self.first_row is None:
            return scales
        return scales[self.first_row // block : (self.first_row + self.num_rows) // block]


_known: WeakKeyDictionary[nn.Module, dict[str, tuple[HFWeight, ...]]] = WeakKeyDictionary()
"""What was found of a model: each sync asks for it."""


def hf_weights(model: nn.Module) -> Mapping[str, tuple[HFWeight, ...]]:
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


def hf_views(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of an unsharded model by their names in a checkpoint, as views of its parameters."""
    weights = hf_weights(model)
    return {
        weight.name: weight.of(parameter.detach())
        for name, parameter in model.named_parameters()
        for weight in weights[name]
    }


def _found(model: nn.Module) -> Iterator[tuple[str, tuple[HFWeight, ...]]]:
    seen: set[str] = set()
    plain: Any = _unsharded(model)
    is_converted = isinstance(model, PreTrainedModel) and bool(get_model_conversion_mapping(plain, add_legacy=False))
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        found = tuple(_of_parameter(plain, name, shape)) if is_converted else (HFWeight(name, shape),)
        names = {weight.name for weight in found}
        if names & seen or sum(weight.shape.numel() for weight in found) != shape.numel():
            raise _unknown(name, shape)
        seen |= names
        yield name, found


def _unsharded(model: Any) -> nn.Module:
    """Return a model of the class from which FSDP made this one's: transformers looks for some conversions by name."""
    if not (isinstance(model, PreTrainedModel) and isinstance(model, FSDPModule)):
        return model  # type: ignore[no-any-return]
    own_class: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with torch.device("meta"):
        return own_class(model.config)  # type: ignore[no-any-return]


def _of_parameter(model: Any, name: str, shape: torch.Size) -> Iterator[HFWeight]:
    """Have transformers convert the shape alone, and then the numbers of the rows, twice: 1 is squeezed."""
    whole = torch.empty(shape, device="meta")
    numbers = torch.arange(shape[:-1].numel()).view(*shape[:-1], 1).expand(*shape[:-1], 2)
    shapes = {hf_name: part.shape for hf_name, part in revert_weight_conversion(model, {name: whole}).items()}
    for hf_name, numbered in revert_weight_conversion(model, {name: numbers}).items():
        if shapes.get(hf_name) == shape and torch.equal(numbered, numbers):
            yield HFWeight(hf_name, shape)
            continue
        first_row = int(numbered.flatten()[0])
        weight = HFWeight(hf_name, shapes.get(hf_name, shape), first_row)
        if len(shape) < 2 or numbered.shape != (*weight.shape[:-1], 2) or weight.shape[-1] != shape[-1]:
            raise _unknown(name, shape)
        if not torch.equal(numbered[..., 0].flatten(), torch.arange(first_row, first_row + weight.num_rows)):
            raise _unknown(name, shape)
        yield weight


def _unknown(name: str, shape: torch.Size) -> ConfigError:
    return ConfigError(
        f"model.policy: transformers makes {name} {list(shape)} of a checkpoint's weights in a way that rlplug cannot "
        "undo, so neither an engine nor a checkpoint can have it. It knows rows one behind the other, such as experts'."
    )
