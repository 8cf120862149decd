"""Checks of what makes a task (rewards, environments, sources of prompts), and a tiny run for tests of plugins."""
