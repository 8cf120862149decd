"""Validation on held-out prompts: its settings, its scores, and when a run does it."""
