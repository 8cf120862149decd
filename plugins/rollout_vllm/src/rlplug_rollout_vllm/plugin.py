"""The entry point: what this distribution registers."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry
from rlplug_rollout_vllm.colocated import VLLMRollout
from rlplug_rollout_vllm.server import VLLMServerRollout

RLPLUG_API_VERSION = ">=2,<3"


@hookimpl
def rlplug_register_rollouts(registry: Registry) -> None:
    registry.add("rollouts", VLLMRollout)
    registry.add("rollouts", VLLMServerRollout)
