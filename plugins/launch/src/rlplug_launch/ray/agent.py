"""The actor of one task: it starts the task's process on its node, and has no other part in the run."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlplug_launch.processes import ChildTask, output_of

POLL_S = 0.25


class Agent:
    """Starts one task. Its process ends when this one does, which Ray ends with the driver and with the node.

    Args:
        folder: The driver's current folder, which must be on this node too.
        threads: The driver's ``OMP_NUM_THREADS``; Ray sets one, to this actor's CPUs.
    """

    def __init__(self, folder: str, threads: str | None) -> None:
        os.environ.pop("OMP_NUM_THREADS", None)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
        self._folder = folder
        self._task: ChildTask | None = None

    def enter(self) -> str:
        """Change to the driver's folder; return this host's name, for people."""
        os.chdir(self._folder)
        return socket.gethostname()

    def call(self, command: Sequence[str], timeout_s: float) -> str:
        """Return the output of a short command."""
        return output_of(command, timeout_s, socket.gethostname())

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: str) -> None:
        """Start the task."""
        self._task = ChildTask(command, environment, Path(log))

    def wait(self) -> int:
        """Return the exit status of the task, once it has ended."""
        assert self._task is not None
        while (status := self._task.poll()) is None:
            time.sleep(POLL_S)
        return status

    def terminate(self) -> None:
        """End the task, with SIGTERM first."""
        assert self._task is not None
        self._task.terminate()

    def kill(self) -> None:
        """Kill the task with all its processes."""
        assert self._task is not None
        self._task.kill()
