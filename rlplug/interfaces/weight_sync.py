"""The weight-sync seam: how the trainer's weights reach an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Bucket: TypeAlias = Sequence[tuple[str, Tensor]]
"""Full (unsharded) tensors under their Hugging Face names, of bounded total size; valid until the next bucket."""


@dataclass(frozen=True)
class SyncReport:
    """What one weight sync moved."""

    num_bytes: int
    num_buckets: int
    num_tensors: int
    seconds: float
    policy_version: int
