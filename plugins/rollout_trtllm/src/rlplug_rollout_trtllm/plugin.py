"""The entry point: what this distribution registers."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry
from rlplug_rollout_trtllm.colocated import TRTLLMRollout
from rlplug_rollout_trtllm.ray_rollout import TRTLLMRayRollout

RLPLUG_API_VERSION = ">=2,<3"


@hookimpl
def rlplug_register_rollouts(registry: Registry) -> None:
    registry.add("rollouts", TRTLLMRollout)
    registry.add("rollouts", TRTLLMRayRollout)
