"""``TRTLLMRollout`` over the double, where a GPU and Ray are replaced and nothing else; and a model with requests."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rlplug_devkit.models import make_model_folder
from rlplug_devkit.reference import ReferencePolicy
from rlplug_engines.colocated import MemoryBefore
from rlplug_rollout_trtllm.colocated import TRTLLMRollout
from rlplug_rollout_trtllm.placement import Bundles
from torch import Tensor

from rlplug.interfaces import Bucket, Placement, PolicySpec
from rlplug.types import Request, SamplingParams

DOUBLE = Path(__file__).parent / "double"
if "tensorrt_llm" not in sys.modules:  # a process that has this one's path has no modules yet
    sys.path.insert(0, str(DOUBLE))
    from trtllm_double.install import install

    install()

CPU = Placement(torch.device("cpu"), rank=0, world_size=1)
GREEDY = SamplingParams(4, temperature=0.0)


class NoRay:
    """Bundles without a Ray: the double's workers are threads."""

    def __init__(self, size: int) -> None:
        self.bundles = Bundles(group="group", indices=list(range(size)))
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class RolloutOnDouble(TRTLLMRollout):
    """The engine that the tests run, on a CPU in the place of a GPU; handles are the double's."""

    def prepare(self, policy: PolicySpec, placement: Placement) -> None:
        pass

    def memory_before(self, placement: Placement) -> MemoryBefore:
        return MemoryBefore(total=16 << 30, free=8 << 30, trainer=4 << 30)

    def make_ray(self, devices: str) -> Any:
        return NoRay(self.ranks_per_engine)

    def handle(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        from trtllm_double.wire import reduce_tensor

        return reduce_tensor(tensor)

    def wait_for_copy(self, device: torch.device) -> None:
        pass

    def collect_handles(self) -> None:
        pass


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
