"""Entry point of rlplug-trainer-titan: registers its trainer, without importing TorchTitan."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry
from rlplug_trainer_titan.trainer import TorchTitan

RLPLUG_API_VERSION = ">=2,<3"


@hookimpl
def rlplug_register_trainers(registry: Registry) -> None:
    registry.add("trainers", TorchTitan)
