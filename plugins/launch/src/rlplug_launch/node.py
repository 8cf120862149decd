"""Runs one task on its node, and ends it with all its processes when the driver asks for that, or is gone::

    python -m rlplug_launch.node --grace S [--gpus 0,1] -- COMMAND...

The driver holds the other end of this process's stdin. An ``e`` in that stream ends the task, with SIGTERM first, and
so does the end of the stream, which comes with the driver's death; a ``k`` kills the task. This works through srun too,
which forwards a stream but not every signal. It imports the standard library alone, for the sake of memory.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import sys

from rlplug_engines.servers import supervisor

END, KILL = b"e", b"k"
SCHEDULER = re.compile(r"(SLURM|SRUN|PMI|PMIX)_.*")
"""Variables with which a scheduler tells a process that it started each rank; here it starts one process a node."""


class Control:
    """The stream from the driver."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_signalled = supervisor.handle_sigterm()
        self._received = b""
        self._is_open = True

    def is_ended(self) -> bool:
        """Whether the task is to end."""
        return END in self._read() or not self._is_open or self._is_signalled()

    def is_killed(self) -> bool:
        """Whether the task is to be killed."""
        return KILL in self._read()

    def _read(self) -> bytes:
        while self._is_open and select.select([self._descriptor], [], [], 0)[0]:
            received = os.read(self._descriptor, 64)
            self._is_open = bool(received)
            self._received += received
        return self._received


def own_gpus(indices: str, seen: str | None) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` of a task that gets some of the GPUs that this process sees.

    Args:
        indices: Such as ``0,1``; empty for none.
        seen: This process's ``CUDA_VISIBLE_DEVICES``, if it has one.
    """
    if seen is None:
        return indices
    names = seen.split(",")
    return ",".join(names[int(index)] for index in indices.split(",") if index)


def main() -> int:
    """Run the task and return its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--gpus")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    for name in [name for name in os.environ if SCHEDULER.fullmatch(name)]:
        del os.environ[name]
    if options.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = own_gpus(options.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    control = Control(sys.stdin.fileno())
    status, _ = supervisor.guard(options.command, control.is_ended, control.is_killed, options.grace)
    return status


if __name__ == "__main__":
    sys.exit(main())
