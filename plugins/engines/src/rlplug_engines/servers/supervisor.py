"""Supervises a server: ends it and all its processes on SIGTERM, or when its parent is gone.

A script of the standard library alone, so that it takes little memory beside a server::

    python supervisor.py TRAINER_PID FOLDER COMMAND...

It is two processes, of which each ends the server when the other one is killed: the guard polls the trainer and adopts
what the keeper leaves behind; the keeper polls the guard and runs the server. Polling takes the place of a pipe, which
stays open in processes that the parent forked, and of ``PR_SET_PDEATHSIG`` at the trainer, where the signal follows the
thread that started this process. The keeper has one thread, and its server has that signal, in case both are killed.

``FOLDER``, with the server's log and secrets, is removed unless the server ended by itself: its log says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

POLL_S = 0.2
GRACE_S = 5.0
"""Time for a server to end by itself."""
ORPHANS_S = 2.0
"""Time, after that, for the processes that it started to release shared memory."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> int:
    """Guard the keeper until the trainer is gone, and return the server's exit status."""
    trainer, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    is_asked = handle_sigterm()
    status, was_asked = guard(command, lambda: is_asked() or os.getppid() != trainer)
    if was_asked:
        shutil.rmtree(folder, ignore_errors=True)
    return status


def guard(
    command: list[str],
    is_ended: Callable[[], bool],
    is_killed: Callable[[], bool] = lambda: False,
    grace_s: float = GRACE_S,
) -> tuple[int, bool]:
    """Run a command in a keeper; return its exit status, and whether it was ended and did not end by itself.

    Args:
        command: What to run.
        is_ended: Returns whether to end it, with SIGTERM first; asked every ``POLL_S`` seconds.
        is_killed: Returns whether to kill it and all that it started, at once.
        grace_s: Time for it to end by itself.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the keeper become children here, to be ended
    this = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        keep(this, command, grace_s)
    was_asked, status = False, None
    while status is None:
        if is_killed():
            was_asked = True
            os.kill(keeper, signal.SIGKILL)
        elif was_asked or is_ended():
            was_asked = True
            os.kill(keeper, signal.SIGTERM)  # more than once: the first may come before the keeper handles it
        time.sleep(POLL_S)
        ended, code = os.waitpid(keeper, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
    end_orphans()  # none, unless the keeper was killed
    return (status if status >= 0 else 128 - status), was_asked


def keep(guard: int, command: list[str], grace_s: float) -> NoReturn:
    """Run the server until it ends, SIGTERM comes, or the guard is gone, and exit with its status."""
    is_stopped = handle_sigterm()
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the server become children here, to be ended
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    while server.poll() is None and not is_stopped() and os.getppid() == guard:
        time.sleep(POLL_S)
    status = end(server, grace_s)
    print(f"The process ended with status {status}.", flush=True)
    os._exit(status if status >= 0 else 128 - status)


def end(server: subprocess.Popen[bytes], grace_s: float) -> int:
    """End a server, with SIGTERM first, and then the processes that it started."""
    server.terminate()
    try:
        status = server.wait(grace_s)
    except subprocess.TimeoutExpired:
        server.kill()
        status = server.wait()
    end_orphans()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    return status


def end_orphans() -> None:
    """Kill the children of this process until none is left, and let Python's resource tracker end by itself."""
    deadline = time.monotonic() + ORPHANS_S
    while (orphans := children()) and time.monotonic() < deadline:
        kill([orphan for orphan in orphans if not is_tracker(orphan)])
        reap()
        time.sleep(0.02)
    kill(children())
    reap()


def handle_sigterm() -> Callable[[], bool]:
    """Ignore Ctrl-C, which is the trainer's, and return a function that says whether SIGTERM came."""
    is_stopped = False

    def stop(*_: Any) -> None:
        nonlocal is_stopped
        is_stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return lambda: is_stopped


def prctl(option: int, value: int) -> None:
    """Set a property of this process, where the system has it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


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
