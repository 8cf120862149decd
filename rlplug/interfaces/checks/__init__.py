"""Checks of what comes back from a plugin or a server, one module for each seam; :mod:`.calls` words every violation.

A check takes microseconds: it looks at whole arrays at once, never synchronises with a GPU, and reads a plugin's
distribution only for a message. ``benchmarks/seam_checks.py`` measures them.
"""
