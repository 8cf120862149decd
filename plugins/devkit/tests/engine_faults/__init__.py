"""Rollout engines with one deliberate fault each, and the check that must be the first to fail on it."""
