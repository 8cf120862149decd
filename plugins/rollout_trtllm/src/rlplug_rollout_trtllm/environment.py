"""TensorRT-LLM and Ray as they are installed, and the environment in which TensorRT-LLM starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from packaging.version import Version
from rlplug_engines.colocated import SupportedVersions, environment_variables, is_trainer_variable

from rlplug.errors import ConfigError

VERSIONS: Final = SupportedVersions(
    engine="TensorRT-LLM",
    plugin="rlplug-rollout-trtllm",
    oldest=Version("1.3.0"),
    newest=Version("1.4.0"),
    install="run inside NVIDIA's TensorRT-LLM container of the 1.3 line, and there pip install rlplug "
    "rlplug-rollout-trtllm",
)
"""Of these, sources and documentation were read, and nothing was run. Import one in :func:`engine_environment`."""

MPI_VARIABLES: Final = re.compile(r"(PMI|PMIX|MPI|OMPI|SLURM)_")
"""Variables of launchers: TensorRT-LLM would join their MPI job, or wait for one."""

NEEDED: Final[Mapping[str, str]] = {
    "TLLM_DISABLE_MPI": "1",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
}
"""No MPI; every worker sees the GPUs of all, and chooses its own; and weights are copied in the order of one stream,
not by a pool of threads. These stay set: TensorRT-LLM looks at the first whenever it is asked for its rank."""


@contextmanager
def engine_environment(devices: str | None = None) -> Iterator[None]:
    """Surround the start of an engine, the import of its library included; the trainer's variables come back after.

    ``devices`` is ``CUDA_VISIBLE_DEVICES`` of the engine's processes, if given. The process that it is set in has
    opened its GPU before, and does not look at it again.
    """
    changes: dict[str, str | None] = {n: None for n in os.environ if MPI_VARIABLES.match(n) or is_trainer_variable(n)}
    os.environ.update(NEEDED)
    with environment_variables(changes if devices is None else changes | {"CUDA_VISIBLE_DEVICES": devices}):
        yield


def visible_devices(first: int, count: int) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for an engine on ``count`` GPUs of the trainer's, from the ``first`` on."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in given.split(",")] if given else [str(index) for index in range(first + count)]
    if not all(name.isdecimal() for name in names):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES is {given}, and TensorRT-LLM's workers read numbers alone: name GPUs by their index."
        )
    return ",".join(names[first : first + count])


def require_ray() -> Any:
    """Import Ray, and return it; ``ConfigError`` without it."""
    try:
        import ray
    except ImportError:
        how = "pip install 'rlplug-rollout-trtllm[ray]'"
        raise ConfigError(f"TensorRT-LLM's workers are actors of Ray, which is not installed: {how}.") from None
    return ray
