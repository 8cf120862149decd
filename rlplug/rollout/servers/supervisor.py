"""Runs a server, and ends it and all its processes when it is told to, or when its parent is gone.

A script of the standard library alone, so that it takes no memory beside a server::

    python keeper.py PARENT_PID COMMAND...

It looks at its parent instead of waiting for a pipe to close or for ``PR_SET_PDEATHSIG``: a pipe stays open in
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
"""How long a server may take to end by itself."""
ORPHANS_S = 2.0
"""How long what it started may take then to give shared memory back."""
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Return the server's exit status."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    is_told = False

    def tell(*_: Any) -> None:
        nonlocal is_told
        is_told = True

    signal.signal(signal.SIGTERM, tell)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # orphans of the server become children here, to be reaped
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while server.poll() is None and not is_told and os.getppid() == parent:
        time.sleep(POLL_S)
    status = end(server)
    print(f"The server ended with status {status}.", flush=True)
    return status if status >= 0 else 128 - status


def end(server: subprocess.Popen[bytes]) -> int:
    """End a server, politely at first, and then what it started."""
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
    """Whether a process is Python's resource tracker, which gives shared memory back when all others are gone."""
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
    """Let children that ended go."""
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
