"""Names and slices of a model's weights in Hugging Face checkpoints, where each expert has weights of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from rlplug.errors import ConfigError
from rlplug.interfaces.weight_sync import HFWeight

if TYPE_CHECKING:
    from rlplug.weight_sync.low_rank import Adapters

DECAYS: Final = ("A_log", "dt_bias")
"""Own names of the parameters of delta nets and Mamba that keep float32 in passes, syncs and exports."""
_known: WeakKeyDictionary[nn.Module, dict[str, tuple[HFWeight, ...]]] = WeakKeyDictionary()
"""Weights of each model, kept because every sync asks for them."""


def sent_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a weight in a sync or an export in ``dtype``, which decays do not take."""
    return torch.float32 if name.rpartition(".")[2] in DECAYS else dtype


def hf_weights(model: nn.Module) -> Mapping[str, tuple[HFWeight, ...]]:
    """Return the weights that each parameter of ``model`` becomes in a Hugging Face checkpoint, by parameter name.

    Engines load these: ``experts.gate_up_proj`` [E, 2 O, I] of Qwen3-MoE becomes ``experts.0.gate_proj.weight``
    [O, I] and 2 E - 1 more. transformers converts the names of a checkpoint, and knows the way back. A low-rank adapter
    becomes none: what it adds is merged into its matrix.

    Args:
        model: A transformers model, or any module, whose names are then kept; sharded or not, or on the meta device.

    Raises:
        ConfigError: transformers converts a weight in a way that is neither a new name nor a stack of matrices.
    """
    if model not in _known:
        _known[model] = dict(_found(model))
    return _known[model]


def hf_views(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of an unsharded model by their checkpoint names, as views of its parameters."""
    weights = hf_weights(model)
    return {
        weight.name: weight.of(parameter.detach())
        for name, parameter in model.named_parameters()
        for weight in weights[name]
    }


def adapter_modules(model: nn.Module) -> dict[str, str]:
    """Return the checkpoint names of the layers that have low-rank adapters, by the name of each one's parameter.

    Raises:
        ConfigError: A layer's weight is stored in another form than the layer has it, so its adapter has no name.
    """
    adapters, weights = adapters_of(model), hf_weights(model)
    modules: dict[str, str] = {}
    for name in () if adapters is None else adapters.updates:
        (weight, *others) = weights[name]
        if others or weight.first_row is not None or weight.convert is not None:
            raise ConfigError(
                f"model.lora.sync is adapters, and {name} is not one weight of a checkpoint, so engines know no layer "
                "for its adapter: set model.lora.sync to merged, or leave it out of model.lora.targets."
            )
        modules[name] = weight.name.removesuffix(".weight")
    return modules


def adapters_of(network: nn.Module) -> Adapters | None:
    """Return the adapters of a network, or ``None`` where all of it trains."""
    adapters: Adapters | None = vars(network).get("rlplug_adapters")
    return adapters


def attach_adapters(network: nn.Module, adapters: Adapters) -> None:
    """Record the adapters of ``network``."""
    vars(network)["rlplug_adapters"] = adapters


def _found(model: nn.Module) -> Iterator[tuple[str, tuple[HFWeight, ...]]]:
    seen: set[str] = set()
    adapters = adapters_of(model)
    plain: Any = _unsharded(model)
    is_converted = isinstance(model, PreTrainedModel) and bool(get_model_conversion_mapping(plain, add_legacy=False))
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        if adapters is not None and name not in adapters.plain_names:
            yield name, ()
            continue
        plain_name = name if adapters is None else adapters.plain_names[name]
        found = tuple(_of_parameter(plain, plain_name, shape)) if is_converted else (HFWeight(plain_name, shape),)
        names = {weight.name for weight in found}
        if names & seen or sum(weight.shape.numel() for weight in found) != shape.numel():
            raise _unknown(plain, name, shape)
        seen |= names
        yield name, found


def _unsharded(model: Any) -> nn.Module:
    """Return a model of the class before FSDP changed it: transformers looks up some conversions by class name."""
    if not (isinstance(model, PreTrainedModel) and isinstance(model, FSDPModule)):
        return model  # type: ignore[no-any-return]
    own_class: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with torch.device("meta"):
        return own_class(model.config)  # type: ignore[no-any-return]


def _of_parameter(model: Any, name: str, shape: torch.Size) -> Iterator[HFWeight]:
    """Yield the checkpoint weights of a parameter, found by converting its shape and its row numbers to a checkpoint.

    Row numbers are repeated in two columns, because transformers squeezes a dimension of 1.
    """
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
            raise _unknown(model, name, shape)
        if not torch.equal(numbered[..., 0].flatten(), torch.arange(first_row, first_row + weight.num_rows)):
            raise _unknown(model, name, shape)
        yield weight


def _unknown(model: nn.Module, name: str, shape: torch.Size) -> ConfigError:
    return ConfigError(
        f"model.policy: transformers makes {name} {list(shape)} of {type(model).__name__} in a way that rlplug cannot "
        "undo, so neither an engine nor a checkpoint could get it: use a model without such a weight. rlplug can undo "
        "renaming and the stacking of a checkpoint's rows, such as experts'."
    )
