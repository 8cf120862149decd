"""The environment in which TensorRT-LLM starts, and the trainer's, which comes back after."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

MPI_VARIABLES: Final = re.compile(r"^(PMI|PMIX|MPI|OMPI|SLURM)_")
"""Of launchers: TensorRT-LLM would join their MPI job, or wait for one."""

TRAINERS_VARIABLES: Final = re.compile(
    r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK"
    r"|ROLE_WORLD_SIZE|ROLE_NAME|PYTORCH_CUDA_ALLOC_CONF|PYTORCH_ALLOC_CONF|TORCHELASTIC_.*)$"
)
"""A rank's place among others, as torchrun says it, and how its allocator works. The engine's workers get a copy of
the environment, and have places of their own."""

NEEDED: Final[Mapping[str, str]] = {
    "TLLM_DISABLE_MPI": "1",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
}
"""No MPI; every worker sees the GPUs of all, and chooses its own; and weights are copied in the order of one stream,
not by a pool of threads. These stay set: TensorRT-LLM looks at the first whenever it is asked for its rank."""


@contextmanager
def engine_environment(devices: str | None = None) -> Iterator[None]:
    """Surround the start of an engine, the import of its library included.

    Args:
        devices: For ``CUDA_VISIBLE_DEVICES`` of the engine's processes; ``None`` leaves it. The process that it is set
            in has opened its GPU before, and does not look at it again.
    """
    removed = {name: value for name, value in os.environ.items() if _is_unwanted(name)}
    former_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    for name in removed:
        del os.environ[name]
    os.environ.update(NEEDED)
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    try:
        yield
    finally:
        os.environ.update(removed)
        if devices is not None:
            if former_devices is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = former_devices


def _is_unwanted(name: str) -> bool:
    return bool(MPI_VARIABLES.match(name) or TRAINERS_VARIABLES.match(name))
