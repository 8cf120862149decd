"""Functions that try what a call must not do, for ``test_sandbox_isolation.py``; as a script they run in a pool.

``python hostile_tools.py NETWORK`` prints the isolation and the outcome of each attempt as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
MIB = 1 << 20


def system_call(function: str, *arguments: object) -> None:
    """Call the C library, and raise its error."""
    if getattr(LIBC, function)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), function)


def fill(path: Path, mib: int) -> int:
    """Write files of 8 MiB each, and return how many there are room for."""
    for number in range(mib // 8):
        try:
            (path / f"hoard-{number}").write_bytes(bytes(8 * MIB))
        except OSError:
            return number
    return mib // 8


ATTEMPTS: dict[str, Callable[[int], object]] = {
    "signal the trainer": lambda trainer: os.kill(trainer, 0),
    "stop the trainer": lambda trainer: os.kill(trainer, signal.SIGCONT),
    "signal its group": lambda trainer: os.killpg(trainer, 0),
    "read its environment": lambda trainer: Path(f"/proc/{trainer}/environ").read_bytes(),
    "read its memory": lambda trainer: open(f"/proc/{trainer}/mem", "rb").close(),
    "list its files": lambda trainer: os.listdir(f"/proc/{trainer}/fd"),
    "trace it": lambda trainer: system_call("ptrace", 16, trainer, 0, 0),
    "copy its memory": lambda trainer: system_call("process_vm_readv", trainer, None, 0, None, 0, 0),
    "anonymous file": lambda _: os.memfd_create("hidden"),
    "shared memory of System V": lambda _: system_call("shmget", 0, MIB, 0o1600),
    "queue of System V": lambda _: system_call("msgget", 0, 0o1600),
    "mount a file system": lambda _: system_call("mount", b"none", b"/dev/shm", b"tmpfs", 0, b"size=1g"),
    "become root": lambda _: os.setuid(0),
    "open a socket": lambda _: socket.socket().close(),
}


def attempt(name: str, trainer: int) -> str:
    """Try something, and say whether it was possible."""
    try:
        ATTEMPTS[name](trainer)
    except OSError:
        return "refused"
    return "possible"


def hoard() -> list[int]:
    """Return how many files of earlier calls are in ``/dev/shm``, and how many of 8 MiB can be added."""
    path = Path("/dev/shm")
    return [len(list(path.glob("hoard-*"))), fill(path, 512)]


if __name__ == "__main__":
    from rlplug_sandbox.sandbox import Limits, ToolPool

    network = sys.argv[1] == "network"
    functions = [f"hostile_tools.{name}" for name in ("attempt", "hoard")]
    pool = ToolPool(functions, Limits(20.0, 64, 1000, 8, network), 1)
    pool.check()
    outcomes = {name: pool.call(functions[0], {"name": name, "trainer": os.getpid()}, "0").text for name in ATTEMPTS}
    hoards = [pool.call(functions[1], {}, "0").text for _ in range(2)]
    print(json.dumps({"isolation": pool.isolation, "outcomes": outcomes, "hoards": hoards}))
