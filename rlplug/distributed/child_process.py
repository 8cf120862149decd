"""Child processes: each leads a session, and ends with all that it started. Nothing of the trainer is loaded."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

TAIL_BYTES: Final = 1 << 16


class ChildProcess(subprocess.Popen[bytes]):
    """A process in a session of its own: Ctrl-C reaches the parent alone, which ends the process and what it started.

    Args:
        command: Program and arguments.
        log: File to which its output is appended; by default it has the parent's streams.
        options: Others of ``Popen``. Stdin is empty by default.
    """

    def __init__(self, command: Sequence[str], log: Path | None = None, **options: Any) -> None:
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
        if log is None:
            super().__init__(command, **options)
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, and no pipe
        with open(os.open(log, flags, 0o666), "ab") as file:
            super().__init__(command, stdout=file, stderr=subprocess.STDOUT, **options)

    def end(self, grace_s: float = 0.0, gone_s: float = 0.0) -> int:
        """Kill what is left of the process and of all in its session after ``grace_s`` seconds; return its status.

        Args:
            grace_s: Time for the process to end by itself, in seconds.
            gone_s: Longest wait for the others to be gone: where nobody waits for orphans they stay listed.
        """
        with suppress(subprocess.TimeoutExpired):
            self.wait(grace_s)
        deadline = time.monotonic() + gone_s
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)
                time.sleep(0.05)
        return self.wait()


def ended_rank(store: Any, world_size: int, wait_s: float) -> str:
    """Return which rank of this host, whose process ``store`` names, has ended, or ends in ``wait_s`` seconds."""
    ends_at = time.monotonic() + wait_s
    try:
        processes = [store.get(f"process/{rank}").decode().split(" ") for rank in range(world_size)]
    except RuntimeError:  # the store has gone with its process
        return "rank 0, or torchrun's agent,"
    while time.monotonic() < ends_at:
        for rank, (host, pid) in enumerate(processes):
            if host == socket.gethostname() and not _runs(int(pid)):
                return f"rank {rank}, process {pid},"
        time.sleep(0.1)
    return "another rank"


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def ending(status: int) -> str:
    """Return how a process ended, from its exit status: minus a signal's number, or 128 more as a shell has it."""
    number = -status if status < 0 else status - 128
    if number in set(signal.Signals):
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with status {status}"


def tail(log: Path, num_lines: int = 40, noise: tuple[str, ...] = ()) -> str:
    """Return the last lines of a log, without empty ones and those that begin with ``noise``."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error.strerror})"
    return "\n".join([line for line in lines if line.strip() and not line.startswith(noise)][-num_lines:])
