"""How a bucket of weights becomes what SGLang reads in its own processes: one tensor on the GPU, and a handle to it."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing  # it teaches ForkingPickler to hand tensors on
from rlplug_engines.flat_buckets import FlatTensor
from torch import Tensor


def serialised(flat: Tensor, places: Sequence[FlatTensor]) -> bytes:
    """Return a handle to ``flat``, which must stay as it is until SGLang has answered, and where each tensor is.

    The entries have what SGLang reads of its ``FlattenedTensorMetadata``. It un-pickles no class but its own and a few
    plain ones, of which ``SimpleNamespace`` is one, so the trainer needs nothing of SGLang.
    """
    entries = [
        SimpleNamespace(
            name=place.name,
            shape=torch.Size(place.shape),
            dtype=getattr(torch, place.dtype),
            start_idx=place.start,
            end_idx=place.end,
            numel=place.end - place.start,
        )
        for place in places
    ]
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()
    return bytes(ForkingPickler.dumps({"flattened_tensor": flat, "metadata": entries}))
