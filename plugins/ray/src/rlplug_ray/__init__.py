"""Ray as a launcher of rlplug."""

from rlplug_ray.launcher import Ray

__all__ = ["Ray"]
