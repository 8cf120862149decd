"""``TRTLLMRollout`` over the double: what a GPU and Ray would do is replaced here, and nothing else of the engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from rlplug_rollout_trtllm.colocated import PlacedRay, TRTLLMRollout
from rlplug_rollout_trtllm.gpu import TrainerGPU
from rlplug_rollout_trtllm.placement import Bundles
from torch import Tensor

from rlplug.rollout.device_memory import MemoryBefore

DOUBLE = Path(__file__).parent / "double"
if str(DOUBLE) not in sys.path:
    sys.path.insert(0, str(DOUBLE))
    from trtllm_double.install import install

    install()


class CPUAsGPU(TrainerGPU):
    """The CPU in the place of a GPU: handles are the double's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def memory(self) -> MemoryBefore:
        return MemoryBefore(total=16 << 30, free=8 << 30, trainer=4 << 30)

    def reduce(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        from trtllm_double.wire import reduce_tensor

        return reduce_tensor(tensor)

    def wait(self) -> None:
        pass

    def collect_handles(self) -> None:
        pass


class NoRay:
    """Bundles without a Ray: the double's workers are threads."""

    def __init__(self, size: int) -> None:
        self.bundles = Bundles(group="group", indices=list(range(size)))
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class RolloutOnDouble(TRTLLMRollout):
    """What the tests run."""

    def make_gpu(self, device: torch.device) -> TrainerGPU:
        return CPUAsGPU(device)

    def make_ray(self, devices: str) -> PlacedRay:
        return NoRay(self.ranks_per_engine)
