"""Prompts: sources, the resumable stream and the Lightning data module."""
