"""SGLang as a rollout engine: beside the trainer on its GPUs, or as servers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplug_rollout_sglang.colocated import SGLangRollout
    from rlplug_rollout_sglang.options import SGLangOptions
    from rlplug_rollout_sglang.server import SGLangServerRollout

__all__ = ["SGLangOptions", "SGLangRollout", "SGLangServerRollout"]

_MODULES = {"SGLangOptions": "options", "SGLangRollout": "colocated", "SGLangServerRollout": "server"}


def __getattr__(name: str) -> Any:
    # late, since SGLang's own processes import the sampler of this package, and should not load the trainer for it
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
