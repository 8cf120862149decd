"""Checks of algorithms, on steps of made-up completions."""
