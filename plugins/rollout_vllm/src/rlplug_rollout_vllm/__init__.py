"""vLLM as a rollout engine: in the trainer's process, or as servers."""

from rlplug_rollout_vllm.colocated import VLLMRollout
from rlplug_rollout_vllm.options import VLLMOptions
from rlplug_rollout_vllm.server import VLLMServerRollout

__all__ = ["VLLMOptions", "VLLMRollout", "VLLMServerRollout"]
