"""Hugging Face's names of TorchTitan's parameters, and the part of a checkpoint's weight that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlplug.distributed.mesh import local_part, local_slices
from rlplug.interfaces import HFWeight


@dataclass(frozen=True)
class Reordered:
    """Converts a parameter whose rows are in another order than the checkpoint's, as Llama's queries and keys."""

    order: Tensor
    """int64 [R]: row of the parameter that is each row of the checkpoint's weight."""

    def __call__(self, parameter: Tensor) -> Tensor:
        """Return the checkpoint's weight of a whole parameter."""
        return parameter[self.order.to(parameter.device)]

    def rows(self, source: Any, rows: slice, others: tuple[slice, ...]) -> Tensor:
        """Return rows of the parameter, read from the checkpoint's weight between the first and last that it needs."""
        needed = self.order.argsort()[rows]
        first, last = int(needed.min()), int(needed.max())
        read: Tensor = source[(slice(first, last + 1), *others)]
        return read[(needed - first).to(read.device)]


def checkpoint_weights(adapter: Any, name: str, shape: torch.Size) -> tuple[HFWeight, ...]:
    """Return the weights that a parameter becomes in a Hugging Face checkpoint, found by converting its row numbers.

    Args:
        adapter: TorchTitan's state-dict adapter of the model.
        name: TorchTitan's name of the parameter.
        shape: Shape of the whole parameter: of a vector, a matrix, or experts' matrices, [E, O, I].
    """
    if len(shape) == 3:
        return _experts(adapter, name, shape)
    numbers = torch.arange(shape[0]).view(-1, *(1 for _ in shape[1:]))
    found: dict[str, Tensor] = adapter.to_hf({name: numbers})
    assert len(found) == 1, f"TorchTitan's adapter makes {sorted(found)} of {name}, not one weight"
    ((hf_name, numbered),) = found.items()
    if torch.equal(numbered, numbers):
        return (HFWeight(hf_name, shape),)
    return (HFWeight(hf_name, shape, convert=Reordered(numbered.flatten())),)


def _experts(adapter: Any, name: str, shape: torch.Size) -> tuple[HFWeight, ...]:
    numbers = torch.arange(shape[0]).view(-1, 1, 1).expand(-1, 2, 2)  # the adapter squeezes dimensions of 1
    found: dict[str, Tensor] = adapter.to_hf({name: numbers})
    experts = {hf_name: int(numbered[0, 0]) for hf_name, numbered in found.items()}
    assert list(experts.values()) == list(range(shape[0])), f"TorchTitan's adapter makes {sorted(found)} of {name}"
    return tuple(HFWeight(hf_name, shape[1:], expert * shape[1]) for hf_name, expert in experts.items())


def copy_weight(parameter: Tensor, weight: HFWeight, source: Any) -> None:
    """Copy what this rank's shard of ``parameter`` has of a checkpoint's weight; of experts, those that it holds.

    Args:
        parameter: The parameter, sharded or not, with memory.
        weight: The weight, one of the parameter's.
        source: The weight's values, whole, of which slices are read; on any device, in any dtype.
    """
    local, slices = local_part(parameter), local_slices(parameter)
    if not local.numel():
        return
    if weight.first_row is not None:
        expert = weight.first_row // weight.num_rows
        if slices[0].start <= expert < slices[0].stop:
            local[expert - slices[0].start].copy_(source[slices[1:]])
    elif isinstance(weight.convert, Reordered):
        local.copy_(weight.convert.rows(source, slices[0], slices[1:]))
    else:
        local.copy_(source[slices])
