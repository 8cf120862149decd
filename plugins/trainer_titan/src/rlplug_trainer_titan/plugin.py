"""The entry point: what this distribution registers. The classes are imported when a run names them."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry

RLPLUG_API_VERSION = ">=3,<4"
RLPLUG_LIBRARIES = ("torchtitan",)


@hookimpl
def rlplug_register_trainers(registry: Registry) -> None:
    registry.add("trainers", "rlplug_trainer_titan.trainer:TorchTitan")
