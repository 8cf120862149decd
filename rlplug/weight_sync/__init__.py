"""Weights in FP8 for the rollout engine: which they are, how they are rounded, and what engines cannot take."""
