"""Launcher interface: starts the processes of a run on the nodes of one machine, scheduler or cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOST: Final = -1
"""Exit status of a process whose node is gone, so that nobody knows how it ended."""


@dataclass(frozen=True)
class TaskNeeds:
    """What one task of a run needs: the trainer's ranks of one node together, or one engine server.

    Attributes:
        name: Role and number, such as ``trainer 0``.
        own_node: Whether no other task of the same role may be on its node.
    """

    name: str
    gpus: int
    own_node: bool = False

    @property
    def role(self) -> str:
        """``trainer`` or ``server``."""
        return self.name.partition(" ")[0]


@dataclass(frozen=True)
class Place:
    """The node that a task gets.

    Attributes:
        node: Its name, for people.
        address: IPv4 address under which the other nodes reach it; of the loopback interface where all tasks share one
            host.
        gpus: Indices among the GPUs that processes of the run see there; ``None`` where the launcher's own start shows
            a process its GPUs alone.
    """

    node: str
    address: str
    gpus: tuple[int, ...] | None = None


class RunningTask(ABC):
    """A task that was started. Its processes end when the driver is gone, however that ended."""

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit status: ``None`` while it runs, :data:`LOST` when its node is gone. It must not block."""

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM to its first process, and SIGKILL to all when its grace time is over."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to all its processes."""


class Launcher(ABC):
    """Base class of launchers. It only places and starts: order, health, faults and logs are the driver's.

    The driver calls :meth:`batch_script`, and where that is ``None``: :meth:`place`, :meth:`call`, :meth:`start`, and
    at last :meth:`close`. After a fault it calls :meth:`place` again, when all tasks have ended, and :meth:`replace`
    when only the node of an engine server is lost.
    """

    def batch_script(self, tasks: Sequence[TaskNeeds], command: Sequence[str], grace_s: float) -> str | None:
        """Return the script of a job in which ``command`` runs the driver; ``None`` when it can run right here.

        Args:
            tasks: All tasks of the run.
            command: This command line.
            grace_s: Time that the run needs between SIGTERM and its end, in seconds.
        """
        return None

    def submit(self, script: str) -> str:
        """Submit a script that :meth:`batch_script` returned, and return a line that says where to look for the job."""
        raise NotImplementedError

    @abstractmethod
    def place(self, tasks: Sequence[TaskNeeds]) -> list[Place]:
        """Reserve a place for each task, and return them in order.

        Raises:
            ConfigError: There are too few nodes or GPUs.
        """

    @abstractmethod
    def call(self, index: int, command: Sequence[str], timeout_s: float) -> str:
        """Run a short command at the place of a task, in the current folder; return its stdout.

        Raises:
            RunError: It failed, or took longer than ``timeout_s``; the message has the end of its stderr.
        """

    @abstractmethod
    def start(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], log: Path, grace_s: float
    ) -> RunningTask:
        """Start a command at the place of a task, in the current folder.

        Args:
            index: Of the task.
            command: Starts with the path of a Python, which is the same on all nodes.
            environment: Variables besides the node's own.
            log: File to append stdout and stderr to; it is in the run folder, which all nodes share.
            grace_s: Time between SIGTERM and SIGKILL.
        """

    def replace(self, index: int) -> Place | None:
        """Return another place for an engine server whose node is lost, while the other tasks run.

        The driver asks every few seconds, and goes on without the server until then. It must not wait.

        Args:
            index: Of the task.

        Returns:
            The place, which :meth:`call` and :meth:`start` use from then on; ``None`` while there is none.

        Raises:
            RunError: There will be none.
        """
        return None

    def close(self) -> None:  # noqa: B027 - overriding is optional
        """Release all places; all tasks have ended."""
