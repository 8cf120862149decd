"""The entry point: what this distribution registers. The classes are imported when a run names them."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry

RLPLUG_API_VERSION = ">=3,<4"


@hookimpl
def rlplug_register_launchers(registry: Registry) -> None:
    for place in (
        "rlplug_launch.local:Local",
        "rlplug_launch.slurm:Slurm",
        "rlplug_launch.ray.launcher:Ray",
    ):
        registry.add("launchers", place)
