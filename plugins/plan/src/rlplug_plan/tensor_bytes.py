"""Sizes of tensors, each storage counted once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


def storage_sizes(tree: Any, device: torch.device) -> list[int]:
    """Return the bytes of each storage that the tensors of a tree have on ``device``."""
    sizes: dict[int, int] = {}
    values = tree_leaves(tree)
    while values:
        value = values.pop()
        if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):  # a DTensor, or a quantised one
            values += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        elif isinstance(value, Tensor) and value.device.type == device.type and value.untyped_storage().nbytes():
            sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return list(sizes.values())
