"""Algorithms for rlplug: one file each, on ``base.PolicyGradient`` and the pure functions beside it."""
