"""SGLang as a rollout engine: beside the trainer on its GPUs, or as servers.

Names are imported late, since SGLang's own processes import the sampler of this package, and should not load the
trainer for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug_rollout_sglang.colocated import SGLangRollout
    from rlplug_rollout_sglang.options import SGLangOptions
    from rlplug_rollout_sglang.server import SGLangServerRollout

__all__ = ["SGLangOptions", "SGLangRollout", "SGLangServerRollout"]

__getattr__ = late_names(
    __name__, {"SGLangOptions": "options", "SGLangRollout": "colocated", "SGLangServerRollout": "server"}
)
