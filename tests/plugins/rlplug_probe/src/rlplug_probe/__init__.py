"""A third-party plugin of rlplug that implements every hook."""
