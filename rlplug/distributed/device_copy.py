"""Asynchronous copies from the host to a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return ``tensor`` on ``device``.

    A copy from pageable memory makes the host wait for all work that the GPU has queued. A copy from pinned memory,
    which torch caches and reuses, does not.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
