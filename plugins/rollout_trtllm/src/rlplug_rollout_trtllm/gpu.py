"""The trainer's GPU, as this plugin needs it: who it is, what is free on it, and handles to what lies there."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from rlplug.errors import ConfigError
from rlplug.rollout.engines import MemoryBefore


class TrainerGPU:
    """One GPU. Tests without one replace this object, and nothing else of the engine.

    Args:
        device: Of the trainer's rank.

    Raises:
        ConfigError: It is no GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError(
                f"model.rollout is TRTLLMRollout, which needs a GPU, and the trainer runs on {device}: use HFRollout "
                "or VLLMRollout there."
            )
        self.device = device

    @property
    def index(self) -> int:
        return self.device.index or 0

    def uuid(self) -> str:
        """Return the name by which the engine's workers know it."""
        from tensorrt_llm._torch.utils import get_device_uuid

        return str(get_device_uuid(self.index))

    def memory(self) -> MemoryBefore:
        return MemoryBefore.of(self.device)

    def reduce(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """Return a handle to a tensor for another process on the same GPU."""
        from torch.multiprocessing.reductions import reduce_tensor

        function, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        return function, arguments

    def wait(self) -> None:
        """Wait until all that was written is there."""
        torch.cuda.current_stream(self.device).synchronize()

    def collect_handles(self) -> None:
        """Free what other processes have let go."""
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def visible_devices(first: int, count: int) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for an engine on ``count`` GPUs of the trainer's, from the ``first`` on.

    Raises:
        ConfigError: The trainer's own names them otherwise than by numbers, which the engine's workers cannot read.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in given.split(",")] if given else [str(index) for index in range(first + count)]
    if not all(name.isdecimal() for name in names):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES is {given}, and TensorRT-LLM's workers read numbers alone: name GPUs by their index."
        )
    return ",".join(names[first : first + count])
