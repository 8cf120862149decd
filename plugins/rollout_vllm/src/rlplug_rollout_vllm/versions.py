"""Which vLLM is installed, and whether this plugin knows it."""

from __future__ import annotations

from typing import Final

from packaging.version import Version

from rlplug.rollout.engines import SupportedVersions

OLDEST: Final = Version("0.26")
NEWEST: Final = Version("0.33")
"""The first that is too new."""

INSTALL: Final = "pip install 'rlplug-rollout-vllm[cuda]', or [cpu] on a machine without a GPU"
VERSIONS: Final = SupportedVersions("vLLM", "rlplug-rollout-vllm", OLDEST, NEWEST, INSTALL)


def require_vllm() -> Version:
    """Import vLLM and return its version.

    Raises:
        ConfigError: It is not installed, cannot be imported, or is not of a version that was tested.
    """
    return VERSIONS.require_module("vllm")
