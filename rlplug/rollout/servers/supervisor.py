"""Supervises a server: ends it and all its processes on SIGTERM, or when its parent is gone.

A script of the standard library alone, so that it takes no memory beside a server::

    python supervisor.py PARENT_PID COMMAND...

It polls its parent instead of waiting for a pipe to close or for ``PR_SET_PDEATHSIG``: a pipe stays open in
processes that the parent forked, and the signal follows the thread that started this process, not the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

POLL_S = 0.2
GRACE_S = 5.0
"""Time for a server to end by itself."""
ORPHANS_S = 2.0
"""Time, after that, for the processes that it started to release shared memory."""
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Return the server's exit status."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    is_stopped = False

    def stop(*_: Any) -> None:
        nonlocal is_stopped
        is_stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # orphans of the server become children here, to be reaped
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while server.poll() is None and not is_stopped and os.getppid() == parent:
        time.sleep(POLL_S)
    status = end(server)
    print(f"The server ended with status {status}.", flush=True)
    return status if status >= 0 else 128 - status


def end(server: subprocess.Popen[bytes]) -> int:
    """End a server, with SIGTERM first, and then the processes that it started."""
    server.terminate()
    try:
        status = server.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        status = server.wait()
    deadline = time.monotonic() + ORPHANS_S
    while (orphans := children()) and time.monotonic() < deadline:
        kill([orphan for orphan in orphans if not is_tracker(orphan)])
        reap()
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    kill(children())
    reap()
    return status


def is_tracker(pid: int) -> bool:
    """Whether a process is Python's resource tracker, which releases shared memory when all others are gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return False


def kill(pids: list[int]) -> None:
    """Kill processes, if they are there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap() -> None:
    """Collect the exit status of children that ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def children() -> list[int]:
    """Return this process's children."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main())
