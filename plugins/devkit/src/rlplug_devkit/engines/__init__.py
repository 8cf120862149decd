"""Checks of rollout engines, by what they look at, and the bench that they share."""
