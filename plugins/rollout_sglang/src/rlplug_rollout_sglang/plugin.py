"""The entry point: what this distribution registers."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry
from rlplug_rollout_sglang.colocated import SGLangRollout
from rlplug_rollout_sglang.server import SGLangServerRollout

RLPLUG_API_VERSION = ">=2,<3"


@hookimpl
def rlplug_register_rollouts(registry: Registry) -> None:
    registry.add("rollouts", SGLangRollout)
    registry.add("rollouts", SGLangServerRollout)
