"""The entry point of GPU metrics, which ``--block gpu_use`` leaves out: an observer, and the hooks that feed it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlplug.plugin_manager import hookimpl

if TYPE_CHECKING:
    from rlplug.interfaces import RunObserver
    from rlplug.types import Rollout
    from rlplug_watch.gpu.use import GPUUse

RLPLUG_API_VERSION = ">=3.1,<4"

_use: GPUUse | None = None
"""Of the run that this process makes."""


@hookimpl
def rlplug_make_observer() -> RunObserver:
    from rlplug_watch.gpu.use import GPUUse

    global _use  # hooks of a module have no other place
    _use = GPUUse()
    return _use


@hookimpl
def rlplug_after_rollout(rollout: Rollout) -> None:
    if _use is not None:
        _use.after_rollout(rollout)


@hookimpl
def rlplug_after_update(metrics: Mapping[str, float]) -> dict[str, float] | None:
    return None if _use is None else _use.after_update(metrics)
