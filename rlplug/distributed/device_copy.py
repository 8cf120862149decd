"""Copies from the host to a GPU that neither wait for it nor hold it up."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return ``tensor`` on ``device``.

    A copy from pageable memory makes the host wait for all that the GPU was given before; one from pinned memory, which
    torch keeps and uses again, does not.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
