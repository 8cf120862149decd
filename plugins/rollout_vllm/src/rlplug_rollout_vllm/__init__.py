"""vLLM as a rollout engine: in the trainer's process, or as servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug_rollout_vllm.colocated import VLLMRollout
    from rlplug_rollout_vllm.options import VLLMOptions
    from rlplug_rollout_vllm.server import VLLMServerRollout

__all__ = ["VLLMOptions", "VLLMRollout", "VLLMServerRollout"]

__getattr__ = late_names(
    __name__, {"VLLMOptions": "options", "VLLMRollout": "colocated", "VLLMServerRollout": "server"}
)
