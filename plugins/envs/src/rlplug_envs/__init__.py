"""Environments of other packages, for rlplug. This module imports nothing, so that ``hosted`` loads no torch."""
