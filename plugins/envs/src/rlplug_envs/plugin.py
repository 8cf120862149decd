"""The entry point: what this distribution registers. The classes are imported when a run names them."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry

RLPLUG_API_VERSION = ">=3,<4"


@hookimpl
def rlplug_register_environments(registry: Registry) -> None:
    for place in (
        "rlplug_envs.reasoning_gym:ReasoningGymEnvironment",
        "rlplug_envs.verifiers_environment:VerifiersEnvironment",
    ):
        registry.add("environments", place)


@hookimpl
def rlplug_register_classes(registry: Registry) -> None:
    registry.add("classes", "rlplug_envs.verifiers_source:VerifiersSource")
