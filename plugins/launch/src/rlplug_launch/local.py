"""``Local``: the launcher for one host."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rlplug_engines.servers.addresses import LOOPBACK

from rlplug.errors import ConfigError
from rlplug_launch.launcher import Launcher, Place, RunningTask, TaskNeeds
from rlplug_launch.processes import ChildTask, FreeNode, divide, node_command, output_of


class Local(Launcher):
    """Starts all processes on this host, which is one node, and has them talk over its loopback interface."""

    def __init__(self) -> None:
        self._places: list[Place] = []

    def place(self, tasks: Sequence[TaskNeeds]) -> list[Place]:
        if sum(task.role == "trainer" for task in tasks) > 1:
            raise ConfigError("trainer.num_nodes is more than 1, and the launcher Local has one node: set it to 1.")
        node = FreeNode(socket.gethostname(), LOOPBACK, list(range(torch.cuda.device_count())))
        self._places = divide(tasks, [node])
        return self._places

    def call(self, index: int, command: Sequence[str], timeout_s: float) -> str:
        return output_of(command, timeout_s, self._places[index].node)

    def start(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], log: Path, grace_s: float
    ) -> RunningTask:
        return ChildTask(node_command(command, self._places[index], grace_s), environment, log)
