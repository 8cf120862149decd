"""Environments that people already have, for rlplug. Imports nothing, because ``hosted`` must stay light."""
