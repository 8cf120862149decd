"""The entry point: what this distribution registers. The classes are imported when a run names them."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry

RLPLUG_API_VERSION = ">=3,<4"
RLPLUG_LIBRARIES = ("vllm",)


@hookimpl
def rlplug_register_rollouts(registry: Registry) -> None:
    for place in (
        "rlplug_rollout_vllm.colocated:VLLMRollout",
        "rlplug_rollout_vllm.server:VLLMServerRollout",
    ):
        registry.add("rollouts", place)
