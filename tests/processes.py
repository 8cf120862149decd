"""Whether processes that a test started, or their children, are still there."""

from __future__ import annotations

import time

import psutil


def runs(pid: int) -> bool:
    """Return whether a process runs: not what is left of one that nobody waited for."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while runs(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)
