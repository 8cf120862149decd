"""A launcher for this host under another name."""

from __future__ import annotations

from rlplug_launch.local import Local


class ProbeLauncher(Local):
    """Starts all processes on this host."""
