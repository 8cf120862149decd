"""Calls that may see Python's files alone, for ``test_sandbox_files.py``: what they try, and a worker without.

``python walled_calls.py LACKS SCRIPT`` stands for a trainer, with the worker ``SCRIPT``, on a machine that lacks
``LACKS``, whose system calls fail: ``namespaces``, ``namespaces,landlock`` or nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER = 0x10000000
CLONE = 56 if platform.machine() == "x86_64" else 220
NUMBERS = {"namespaces": (272, 97), "landlock": (444, 444)}
"""``unshare`` and ``landlock_create_ruleset`` on x86_64 and aarch64."""


def attempt(name: str, trainer: int, folder: str) -> str:
    """Try something outside the call, and say whether it was possible."""
    try:
        found = {
            "list the folder": lambda: os.listdir(folder),
            "read a file for all": lambda: Path(folder, "for-all").read_bytes(),
            "read a file of its user": lambda: Path(folder, "for-me").read_bytes(),
            "read a file in a program": lambda: subprocess.check_output(["cat", f"{folder}/for-all"]),
            "read the system's users": lambda: Path("/etc/passwd").read_bytes(),
            "write a file": lambda: Path(folder, "written").write_text("x"),
            "replace a file": lambda: os.replace(Path(folder, "for-all"), Path(folder, "gone")),
            "change a mode": lambda: os.chmod(Path(folder, "for-all"), 0o777),
            "change a time": lambda: os.utime(Path(folder, "for-all"), (0, 0)),
            "leave the root": lambda: os.chroot("/proc/1/root"),
            "read the trainer": lambda: os.getpid() == 1 or Path(f"/proc/{trainer}/environ").read_bytes(),
            "signal the trainer": lambda: os.getpid() == 1 or os.kill(trainer, signal.SIGCONT),
            "limit the trainer": lambda: os.getpid() == 1 or resource.prlimit(trainer, resource.RLIMIT_CORE, (0, 0)),
            "slow the trainer": lambda: os.getpid() == 1 or os.setpriority(os.PRIO_PROCESS, trainer, 19),
            "move the trainer": lambda: os.getpid() == 1 or os.sched_setaffinity(trainer, {0}),
            "be root in a user namespace": lambda: libc("unshare", NEW_USER),
            "be root in a user namespace by a fork": lambda: libc("syscall", CLONE, NEW_USER | 17, 0, 0, 0, 0),
            "fill the buffers of sockets": lambda: hold_in_sockets(64 << 20),
            "reach another by a pair": lambda: socket.socketpair()[0].bind("\0other"),
            "pass on a socket of a pair": lambda: socket.send_fds(socket.socketpair()[0], [b"x"], [0]),
            "send from a pair of datagrams": lambda: socket.socketpair(type=socket.SOCK_DGRAM),
            "leave ten thousand empty files": lambda: (
                os.getpid() != 1 or [os.mknod(f"/dev/shm/{index}") for index in range(10_000)]
            ),
            "open a thousand files": lambda: [os.open(os.devnull, os.O_RDONLY) for _ in range(1000)],
        }[name]()
    except (OSError, subprocess.CalledProcessError):
        return "refused"
    return "refused" if found is True else "possible"


def libc(function: str, *arguments: int) -> None:
    """Call the C library, and raise its error; in a new process end it."""
    status = getattr(LIBC, function)(*arguments)
    if status == 0 and function == "syscall":
        os._exit(0)
    if status < 0:
        raise OSError(ctypes.get_errno(), function)


def hold_in_sockets(num_bytes: int) -> None:
    """Fill the buffers of as many pairs of sockets as there can be, and raise ``OSError`` before ``num_bytes``."""
    pairs = []
    while num_bytes > 0:
        pairs.append(socket.socketpair())
        for one in pairs[-1]:
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    num_bytes -= one.send(bytes(1 << 16))


def fill_memory(num_processes: int, mib: int) -> str:
    """Hold memory in that many processes at once, each below the limit of one, for ever."""
    for _ in range(num_processes):
        if os.fork() == 0:
            break
    held = b"x" * (mib << 20)
    time.sleep(1e6)
    return f"held {len(held)}"


async def step(value: int) -> int:
    await asyncio.sleep(0)
    return value


def run_event_loop() -> int:
    """Return 3 out of an event loop, with a thread that wakes it and a program that it writes to."""

    async def main() -> int:
        program = [sys.executable, "-c", "print(len(input()))"]
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(*program, **pipes)
        printed, _ = await process.communicate(b"x")
        return await step(int(printed)) + await asyncio.to_thread(int, 2)

    return asyncio.run(main())


def solve(text: str) -> str:
    """Return what a program with a working folder and a library finds."""
    command = [
        sys.executable,
        "-I",
        "-c",
        f"import json, zoneinfo\nopen('x', 'w').write({text!r})\nprint(open('x').read())",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    lacks, script = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(script))
    import sandbox_isolation as isolation

    isolation.REFUSED.clear()
    isolation.REFUSED.update({name: NUMBERS[name] for name in filter(None, lacks.split(","))})
    if isolation.REFUSED:
        import sandbox_limits

        sandbox_limits.keep_rights()
        isolation.filter_system_calls(network=True)
    trainer = str(os.getpid())
    if (worker := os.fork()) == 0:
        os.execv(sys.executable, [sys.executable, script, trainer])
    os.close(0)  # the worker ends at the end of its input
    os.waitpid(worker, 0)
