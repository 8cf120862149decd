"""Runs a server, and ends it and all its processes when it is told to, or when its parent is gone.

A script of the standard library alone, so that it takes no memory beside a server::

    python server_keeper.py PARENT_PID COMMAND...

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
    """End a server and all that it started: first politely, then not."""
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    status = server.wait()
    deadline = time.monotonic() + GRACE_S
    while (orphans := children()) and time.monotonic() < deadline:
        for orphan in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
    return status


def children() -> list[int]:
    """Return this process's children."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main())
