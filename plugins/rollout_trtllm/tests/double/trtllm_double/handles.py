"""Handles of CPU tensors that look as those of CUDA memory: what ``torch.multiprocessing.reductions`` gives on a GPU.

A test replaces the plugin's ``reduce_tensor`` by this one. The handle's bytes key a table of the process, in which the
tensor and a copy lie: a tensor that was written to before the engine opened it shows (contract ``wire``,
``clone_before_reduce``), where CUDA's sharing corrupts silently.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from trtllm_double.contract import WIRE

HANDLE_BYTES = 64
_HANDLE, _DEVICE = 7, 6


@dataclasses.dataclass
class _Lent:
    tensor: Tensor
    copy: Tensor
    opened_by: set[Any]


_lent: dict[bytes, _Lent] = {}
_numbers = itertools.count(1)


def reduce_tensor(tensor: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return ``rebuild_cuda_tensor`` and its arguments, as for a CUDA tensor."""
    tensor = tensor.detach()
    handle = next(_numbers).to_bytes(HANDLE_BYTES, "big")
    _lent[handle] = _Lent(tensor, tensor.clone(), set())
    return rebuild_cuda_tensor, (
        type(tensor),
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        type(tensor._typed_storage()),
        tensor.dtype,
        tensor.device.index or 0,
        handle,
        tensor.untyped_storage().nbytes(),
        0,
        tensor.requires_grad,
        b"reference counter",
        0,
        b"event",
        True,
    )


def open_handle(name: str, func: Any, args: Sequence[Any], device: int, worker: Any) -> tuple[bytes, Tensor]:
    """Return the handle and the tensor, as the receiver's ``func(*args)`` does with ``args[6]`` replaced.

    Raises:
        ValueError: No call of ``rebuild_cuda_tensor``, or too few arguments (contract ``wire.len_args_gt``).
        RuntimeError: An unknown handle, one that ``worker`` opened before, or a tensor that was written to since.
    """
    if func is not rebuild_cuda_tensor:
        raise ValueError(f"{name}: {func!r} does not rebuild a tensor of CUDA's: send what reduce_tensor returns")
    if len(args) <= WIRE["len_args_gt"] or len(args) <= _HANDLE:
        raise ValueError(f"{name}: {len(args)} arguments, and more than {WIRE['len_args_gt']} are needed")
    replaced = [*args[:_DEVICE], device, *args[_DEVICE + 1 :]]
    handle = replaced[_HANDLE]
    if handle not in _lent:
        raise RuntimeError(f"{name}: unknown handle: its tensor is gone, or the sync that it was for is finalised")
    lent = _lent[handle]
    if worker in lent.opened_by:
        raise RuntimeError(f"{name}: a worker opened this handle before")
    if not _same_memory(lent.tensor, lent.copy):
        raise RuntimeError(f"{name}: re-used tensor: {WIRE['clone_before_reduce']}")
    lent.opened_by.add(worker)
    if (lent.tensor.size(), lent.tensor.dtype) != (replaced[1], replaced[5]):
        raise ValueError(f"{name}: the handle is of another tensor")
    return handle, lent.tensor


def drop(handles: Iterable[bytes]) -> None:
    """Forget handles: their memory may go."""
    for handle in handles:
        _lent.pop(handle, None)


def num_open() -> int:
    """Return how many handles keep their tensors alive."""
    return len(_lent)


def _same_memory(tensor: Tensor, copy: Tensor) -> bool:
    """Bit by bit, since NaN is what a lent bucket becomes."""
    return torch.equal(tensor.reshape(-1).view(torch.uint8), copy.reshape(-1).view(torch.uint8))
