"""Rollouts: from prompts to completions."""
