"""Calls that may see Python's files alone, for ``test_sandbox_files.py``: what they try, and a worker without.

``python walled_calls.py LACKS SCRIPT`` stands for a trainer, with the worker ``SCRIPT``, on a machine that lacks
``LACKS``, whose system calls fail: ``namespaces``, ``namespaces,landlock`` or nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

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
            "fill the buffers of sockets": lambda: socket.socketpair(),
            "open a thousand files": lambda: [os.open(os.devnull, os.O_RDONLY) for _ in range(1000)],
        }[name]()
    except (OSError, subprocess.CalledProcessError):
        return "refused"
    return "refused" if found is True else "possible"


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
