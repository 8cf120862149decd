"""The entry point: what this distribution registers."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry
from rlplug_ray.launcher import Ray

RLPLUG_API_VERSION = ">=2,<3"


@hookimpl
def rlplug_register_launchers(registry: Registry) -> None:
    registry.add("launchers", Ray)
