"""Storages of tensors: each once, with its size in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


def distinct_storages(tree: Any, device: torch.device) -> list[tuple[torch.UntypedStorage, int]]:
    """Return the distinct storages of the tensors of a tree that are on ``device``, with their sizes in bytes."""
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for leaf in tree_leaves(tree):
        for tensor in _plain_tensors(leaf):
            storage = tensor.untyped_storage()
            if tensor.device.type == device.type and storage.nbytes():
                found[storage.data_ptr()] = (storage, storage.nbytes())
    return list(found.values())


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors inside a DTensor or a quantised tensor, or a plain tensor itself."""
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:  # torch 2.13 names the mesh too
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
