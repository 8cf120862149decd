"""Which vLLM is installed, and whether this plugin knows it."""

from __future__ import annotations

import importlib
from typing import Final

from packaging.version import Version

from rlplug.errors import ConfigError

OLDEST: Final = Version("0.26")
NEWEST: Final = Version("0.33")
"""The first that is too new."""

INSTALL: Final = "pip install 'rlplug-rollout-vllm[cuda]', or [cpu] on a machine without a GPU"


def require_vllm() -> Version:
    """Import vLLM and return its version.

    Raises:
        ConfigError: It is not installed, cannot be imported, or is not of a version that was tested.
    """
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError as problem:
        if problem.name != "vllm":
            raise ConfigError(f"vLLM is installed and cannot be imported: it lacks {problem.name!r}.") from problem
        raise ConfigError(f"model.rollout needs vLLM, which is not installed: {INSTALL}.") from None
    version = Version(vllm.__version__)
    if not OLDEST <= Version(version.base_version) < NEWEST:
        raise ConfigError(
            f"vLLM {version} is installed, and rlplug-rollout-vllm knows {OLDEST} up to, not including, {NEWEST}: "
            f"{INSTALL}."
        )
    return version
