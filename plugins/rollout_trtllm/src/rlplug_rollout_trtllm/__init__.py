"""TensorRT-LLM as a rollout engine: beside the trainer on its GPUs, or on GPUs of a Ray cluster.

It was never run on TensorRT-LLM itself: a strict double, made from the contract of the 1.3 line, stands in for it in
the tests. ``python -m rlplug_rollout_trtllm.smoke`` is what to run first where the engine is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplug_rollout_trtllm.colocated import TRTLLMRollout
    from rlplug_rollout_trtllm.options import TRTLLMOptions
    from rlplug_rollout_trtllm.ray_rollout import TRTLLMRayRollout

__all__ = ["TRTLLMOptions", "TRTLLMRayRollout", "TRTLLMRollout"]

_MODULES = {"TRTLLMOptions": "options", "TRTLLMRayRollout": "ray_rollout", "TRTLLMRollout": "colocated"}


def __getattr__(name: str) -> Any:
    # late, since the engine's own workers import an extension of this package, and should not load the trainer for it
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
