"""What ``update_weights`` gets: the contract's ``wire``, and handles of CPU tensors that look as those of CUDA memory.

``reduce_tensor`` is in the place of ``torch.multiprocessing.reductions.reduce_tensor``, which gives such handles on a
GPU. A handle's bytes key a table of the process, in which the tensor and a copy lie: a tensor that was written to
before the engine opened it shows (``clone_before_reduce``), where CUDA's sharing corrupts silently.
"""

from __future__ import annotations

import base64
import dataclasses
import fnmatch
import io
import itertools
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from trtllm_double.contract import WIRE

_DISALLOWED: Final = {("torch.storage", "_load_from_bytes"), ("torch.hub", "_load_local"), ("torch", "save")}
"""Globals that ``WorkerExtension.update_weights`` excludes by name, in ``tensorrt_llm/llmapi/rlhf_utils.py``. The first
is what a CPU tensor's own pickle calls."""

_DEVICE, _HANDLE = 6, 7


class _Unpickler(pickle.Unpickler):
    """Contract ``wire.pickle_globals``."""

    def find_class(self, module: str, name: str) -> Any:
        is_listed = any(fnmatch.fnmatchcase(module, pattern) for pattern in WIRE["pickle_globals"])
        if not is_listed or (module, name) in _DISALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} may not be loaded: only {WIRE['pickle_globals']} may")
        return super().find_class(module, name)


def decode(payload: Any) -> list[tuple[str, tuple[Any, tuple[Any, ...]]]]:
    """Return names and handles of one worker's payload.

    Raises:
        TypeError: It is no text.
        ValueError: It is no base64 of a pickled list of (name, (callable, args)), or has a name twice.
        pickle.UnpicklingError: It asks for a global that is not allowed.
    """
    if not isinstance(payload, str):
        raise TypeError(f"a payload must be base64 text, as {WIRE['weights']} says, and is a {type(payload).__name__}")
    items = _Unpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    if not isinstance(items, list):
        raise ValueError(f"a payload must be a pickled list, and is a {type(items).__name__}")
    for item in items:
        match item:
            case (str(), (func, tuple())) if callable(func):
                pass
            case _:
                raise ValueError(f"a payload has {item!r} instead of (name, (rebuild_callable, args))")
    names = [name for name, _ in items]
    if len(set(names)) != len(names):
        raise ValueError(f"a payload has a name twice: {sorted(names)}")
    return items


def names_of(weights: Any) -> tuple[str, ...] | None:
    """Return the names that an update brings, for the journal; none of them where it cannot be read."""
    if weights is None:
        return None
    try:
        return tuple(name for name, _ in decode(next(iter(weights.values()))))
    except (AttributeError, EOFError, StopIteration, TypeError, ValueError, pickle.UnpicklingError):
        return ()


# ---- handles --------------------------------------------------------------------------------------------------------


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
    handle = next(_numbers).to_bytes(64, "big")
    _lent[handle] = _Lent(tensor, tensor.clone(), set())
    place = (type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset(), type(tensor._typed_storage()))
    storage = (handle, tensor.untyped_storage().nbytes(), 0, tensor.requires_grad, b"counter", 0, b"event", True)
    return rebuild_cuda_tensor, (*place, tensor.dtype, tensor.device.index or 0, *storage)


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
    if not same_bits(lent.tensor, lent.copy):
        raise RuntimeError(f"{name}: re-used tensor: {WIRE['clone_before_reduce']}")
    lent.opened_by.add(worker)
    if (lent.tensor.size(), lent.tensor.dtype) != (replaced[1], replaced[5]):
        raise ValueError(f"{name}: the handle is of another tensor")
    return handle, lent.tensor


def drop(handles: Iterable[bytes]) -> None:
    """Forget handles: their memory may go."""
    for handle in handles:
        _lent.pop(handle, None)


def same_bits(first: Tensor, other: Tensor) -> bool:
    """Compare bit by bit, since NaN is what a lent bucket becomes."""
    return (first.dtype, first.shape) == (other.dtype, other.shape) and torch.equal(
        first.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )
