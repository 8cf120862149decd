"""The entry point: what this distribution registers. A class is imported when a run names it."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry

RLPLUG_API_VERSION = ">=3,<4"


@hookimpl
def rlplug_register_trainers(registry: Registry) -> None:
    registry.add("trainers", "rlplug_hybrids.trainer:HybridTrainer")
    registry.add("trainers", "rlplug_hybrids.trainer:PaddedTrainer")
