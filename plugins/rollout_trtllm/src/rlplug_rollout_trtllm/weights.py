"""The form of weights that TensorRT-LLM's workers read on the trainer's own GPUs: handles to tensors."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import Tensor

from rlplug.errors import RunError

Reduce: TypeAlias = Callable[[Tensor], tuple[Any, tuple[Any, ...]]]
"""From a tensor to what makes it again in another process, and its arguments."""


def serialised(named: Iterable[tuple[str, Tensor]], reduce: Reduce) -> str:
    """Return handles to tensors, which must stay as they are until the engine has answered, as its workers read them.

    Only globals of torch and plain values are in it: the workers un-pickle nothing else.
    """
    handles = [(name, reduce(tensor)) for name, tensor in named]
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")


def merged(payloads: Iterable[dict[str, str]]) -> dict[str, str]:
    """Return the payloads of all GPUs of an engine as one, by the GPU's UUID.

    Raises:
        RunError: Two are of the same GPU.
    """
    together: dict[str, str] = {}
    for payload in payloads:
        if shared := together.keys() & payload.keys():
            raise RunError(f"two ranks that share an engine train on the same GPU, {min(shared)}.")
        together |= payload
    return together
