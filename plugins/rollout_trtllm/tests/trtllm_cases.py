"""What the tests of both engines need: a small model, its weights, and requests."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch

from rlplug.interfaces import Bucket, Placement, PolicySpec
from rlplug.testing.models import make_model_folder
from rlplug.testing.reference import ReferencePolicy
from rlplug.types import Request

CPU = Placement(torch.device("cpu"), rank=0, world_size=1)


@functools.cache
def reference(folder: Path) -> ReferencePolicy:
    """Return the model of a folder, which is made if it is not there."""
    if not folder.exists():
        make_model_folder("llama", folder)
    return ReferencePolicy(str(folder), torch.float32)


def spec(folder: Path) -> PolicySpec:
    reference(folder)
    return PolicySpec(str(folder), torch.float32, eos_token_ids=(1, 7), pad_token_id=0, max_context=256)


def buckets(folder: Path, max_bytes: int = 100_000) -> Iterator[Bucket]:
    return reference(folder).buckets(CPU.device, max_bytes)


def requests(count: int) -> list[Request]:
    return [Request(f"r{number}", (5, 6, 10 + number), seed=number) for number in range(count)]
