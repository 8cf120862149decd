"""Algorithms for rlplug."""
