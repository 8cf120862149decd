"""Tasks of an attempt, and what is said of one that ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlplug.distributed.child_process import ending, tail
from rlplug_launch.launcher import LOST, Place, RunningTask
from rlplug_launch.logs import LogReader
from rlplug_launch.state import TaskState


@dataclass
class Task:
    """A task of one attempt."""

    index: int
    row: TaskState
    place: Place
    port: int
    log: Path
    reader: LogReader
    running: RunningTask | None = None
    status: int | None = None
    """Exit status, once it has ended."""

    @property
    def is_running(self) -> bool:
        return self.running is not None and self.status is None

    def poll(self) -> None:
        """Note whether it has ended."""
        if self.running is not None and self.status is None:
            self.status = self.running.poll()
            if self.status is not None:
                self.row.state = "finished" if self.status == 0 else self._ending()

    def describe(self) -> str:
        """Return how it ended, where, and its last log lines."""
        assert self.status is not None
        return f"{self.row.name} on {self.place.node} {self._ending()}; the end of {self.log}:\n{tail(self.log)}"

    def _ending(self) -> str:
        assert self.status is not None
        return "was lost with its node" if self.status == LOST else ending(self.status)


def gpus_text(num_gpus: int, place: Place) -> str:
    """Return the GPUs of a task for the table."""
    if num_gpus == 0:
        return "none"
    return f"{num_gpus} of the node" if place.gpus is None else ",".join(map(str, place.gpus))
