"""Which TensorRT-LLM and Ray are installed, and whether this plugin knows them. Both are imported here first."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

from packaging.version import Version

from rlplug.errors import ConfigError
from rlplug_rollout_trtllm.surface import LLM_ARGS, installed_arguments

OLDEST: Final = Version("1.3.0")
NEWEST: Final = Version("1.4.0")
"""The first that is too new. Of what lies between, sources and documentation were read, and nothing was run."""

CONTAINER: Final = (
    "run inside NVIDIA's TensorRT-LLM container of the 1.3 line, and there pip install rlplug rlplug-rollout-trtllm"
)
RAY: Final = "pip install 'rlplug-rollout-trtllm[ray]'"


def require_tensorrt_llm() -> Version:
    """Import TensorRT-LLM, and return its version; inside :func:`environment.engine_environment`.

    Raises:
        ConfigError: It is not installed, cannot be imported, or is not of a version that is known.
    """
    try:
        module = importlib.import_module("tensorrt_llm")
    except ImportError as problem:
        if problem.name == "tensorrt_llm":
            raise ConfigError(f"model.rollout needs TensorRT-LLM, which is not installed: {CONTAINER}.") from None
        raise ConfigError(f"TensorRT-LLM cannot be imported here ({problem}): {CONTAINER}.") from problem
    version = Version(str(module.__version__))
    if not OLDEST <= Version(version.base_version) < NEWEST:
        raise ConfigError(
            f"TensorRT-LLM {version} is installed, and rlplug-rollout-trtllm knows {OLDEST} up to, not including, "
            f"{NEWEST}: {CONTAINER}."
        )
    return version


def require_ray() -> Any:
    """Import Ray, and return it.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(f"TensorRT-LLM's workers are actors of Ray, which is not installed: {RAY}.") from None


def argument_names() -> set[str]:
    """Return the names of the engine's arguments: those of the contract, and those that the installed one lists.

    Where TensorRT-LLM is not installed, as on a trainer's host whose engines are elsewhere, those of the contract.
    """
    is_installed = importlib.util.find_spec("tensorrt_llm") is not None
    return set(LLM_ARGS) | set((installed_arguments() if is_installed else None) or ())
