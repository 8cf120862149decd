"""Parts of a Hugging Face model that become FSDP units, and that optimisations wrap."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def pretrained_part(model: nn.Module) -> PreTrainedModel | None:
    """Return the transformers model that ``model`` is or contains, as a critic does; ``None`` for a value head."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: the items of its longest module list, or dictionary by number."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    numbered = [
        module for module in model.modules() if isinstance(module, nn.ModuleDict) and all(map(str.isdigit, module))
    ]
    return max([*lists, *(list(module.values()) for module in numbered)], key=len, default=[])


def untied_embeddings(model: nn.Module) -> list[nn.Module]:
    """Return the input embeddings and the output layer of the Hugging Face model in ``model``, if it has them.

    Tied ones are left out: FSDP needs each parameter in one unit, and both ends of the model read this one.
    """
    inner = pretrained_part(model)
    if inner is None:
        return []
    ends = [end for end in (inner.get_input_embeddings(), inner.get_output_embeddings()) if end is not None]
    return ends if len({id(end.weight) for end in ends}) == len(ends) else []


def transformer_units(model: nn.Module) -> list[nn.Module]:
    """Return the FSDP units of a Hugging Face model besides itself: its blocks, input embeddings and output layer."""
    return [*transformer_blocks(model), *untied_embeddings(model)]
