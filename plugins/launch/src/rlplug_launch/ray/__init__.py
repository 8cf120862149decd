"""Ray as a launcher of rlplug."""

from rlplug_launch.ray.launcher import Ray

__all__ = ["Ray"]
