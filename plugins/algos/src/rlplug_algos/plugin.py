"""The entry point: what this distribution registers."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry
from rlplug_algos.grpo import GRPO

RLPLUG_API_VERSION = ">=1,<2"


@hookimpl
def rlplug_register_algorithms(registry: Registry) -> None:
    registry.add("algorithms", GRPO)
