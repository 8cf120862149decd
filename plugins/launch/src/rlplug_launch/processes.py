"""Tasks that the driver starts as its own child processes, and nodes that it divides among tasks itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlplug.distributed.child_process import ChildProcess
from rlplug.errors import ConfigError, RunError
from rlplug_launch.launcher import Place, RunningTask, TaskNeeds
from rlplug_launch.node import END, KILL

TAIL: Final = 2000
"""Characters of stderr that a message shows."""


class ChildTask(RunningTask):
    """A child process of the driver that runs :mod:`rlplug_launch.node`, here or through another program.

    Args:
        command: Starts it; its stdin reaches the node's process.
        environment: Variables besides the driver's own.
        log: File to append its output to.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._process = ChildProcess(command, log, env={**os.environ, **environment}, stdin=subprocess.PIPE)

    def poll(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        self._send(END)

    def kill(self) -> None:
        self._send(KILL)

    def _send(self, request: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(request)
            self._process.stdin.flush()


def node_command(command: Sequence[str], place: Place, grace_s: float) -> list[str]:
    """Return the command that runs a task on its node."""
    gpus = [] if place.gpus is None else ["--gpus", ",".join(map(str, place.gpus))]
    return [sys.executable, "-m", "rlplug_launch.node", "--grace", f"{grace_s:g}", *gpus, "--", *command]


def output_of(command: Sequence[str], timeout_s: float, where: str) -> str:
    """Run a short command and return its stdout.

    Raises:
        RunError: It failed, or took longer than ``timeout_s``.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"{where}: {command[0]} did not answer within {timeout_s:g} s.") from None
    except OSError as error:
        raise RunError(f"{where}: {command[0]} cannot be started: {error.strerror}.") from error
    if done.returncode:
        raise RunError(f"{where}: {command[0]} ended with status {done.returncode}: {done.stderr.strip()[-TAIL:]}")
    return done.stdout


@dataclass
class FreeNode:
    """A node with the GPUs that no task has yet."""

    name: str
    address: str
    gpus: list[int]


def divide(tasks: Sequence[TaskNeeds], nodes: Sequence[FreeNode]) -> list[Place]:
    """Give each task, in order, the first node that has enough free GPUs for it.

    Args:
        tasks: Those of the trainer first.
        nodes: All nodes; their free GPUs are taken away.

    Raises:
        ConfigError: No node has enough; the message lists what is free.
    """
    places = []
    taken: set[tuple[str, str]] = set()
    for task in tasks:
        for node in nodes:
            is_taken = task.own_node and (task.role, node.name) in taken
            if len(node.gpus) >= task.gpus and not is_taken:
                break
        else:
            free = ", ".join(f"{node.name}: {len(node.gpus)}" for node in nodes)
            raise ConfigError(
                f"there is no node for {task.name}, which takes {task.gpus} GPUs"
                f"{' on a node of its own' if task.own_node else ''}. Free GPUs after the tasks before it: {free}. "
                "Take more nodes, or set trainer.num_nodes, trainer.devices, launch.servers.count and "
                "launch.servers.gpus to what there is."
            )
        given, node.gpus = node.gpus[: task.gpus], node.gpus[task.gpus :]
        taken.add((task.role, node.name))
        places.append(Place(node.name, node.address, tuple(given)))
    return places
