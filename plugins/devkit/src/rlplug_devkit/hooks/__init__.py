"""Checks of a plugin's hooks, called as a run calls them."""
