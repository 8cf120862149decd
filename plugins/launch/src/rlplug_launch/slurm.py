"""``Slurm``: the launcher for a cluster with SLURM; it submits a job, or runs inside an allocation through srun."""

from __future__ import annotations

import math
import os
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rlplug_engines.servers.addresses import LOOPBACK, is_loopback

from rlplug.errors import ConfigError, RunError
from rlplug_launch.launcher import Launcher, Place, RunningTask, TaskNeeds
from rlplug_launch.processes import ChildTask, FreeNode, divide, node_command, output_of

COMMAND_S: Final = 60.0
MARGIN_S: Final = 60.0
"""Time in seconds, besides the trainer's, for servers to end and for SLURM to notice."""


class Slurm(Launcher):
    """Submits the run as a job. Inside an allocation (``salloc``, or a job) it starts each task as a step with srun.

    Args:
        gpus_per_node: GPUs of each node that the run may use; 0 for nodes without.
        nodes: Number of nodes to ask for; by default as many as the tasks fill.
        sbatch: Further options of sbatch, such as ``--partition=gpu`` and ``--time=8:00:00``.
        srun: Further options of srun, for each task.
    """

    def __init__(
        self,
        gpus_per_node: int = 0,
        nodes: int | None = None,
        sbatch: Sequence[str] = (),
        srun: Sequence[str] = (),
    ) -> None:
        if gpus_per_node < 0:
            raise ConfigError(f"launch.launcher.gpus_per_node is {gpus_per_node}: give a number from 0.")
        self.gpus_per_node = gpus_per_node
        self.nodes = nodes
        self.sbatch = list(sbatch)
        self.srun = list(srun)
        self._places: list[Place] = []

    # ---- outside an allocation --------------------------------------------------------------------------------------

    def batch_script(self, tasks: Sequence[TaskNeeds], command: Sequence[str], grace_s: float) -> str | None:
        if "SLURM_JOB_ID" in os.environ:
            return None
        options = [
            "--job-name=rlplug",
            f"--nodes={self.nodes or self._num_nodes(tasks)}",
            "--ntasks-per-node=1",
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            # SLURM sends SIGTERM to the driver alone, so long before the end of the job
            f"--signal=B:TERM@{math.ceil(grace_s + MARGIN_S)}",
            "--no-requeue",  # it would start from the beginning; rlplug launch --resume goes on
            "--output=rlplug-%j.log",
            *self.sbatch,
        ]
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]
        return "\n".join([*lines, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}", ""])

    def submit(self, script: str) -> str:
        done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        if done.returncode:
            raise RunError(f"sbatch refuses the job: {done.stderr.strip()}")
        return f"{done.stdout.strip()}; its output is in rlplug-{done.stdout.split()[-1]}.log"

    def _num_nodes(self, tasks: Sequence[TaskNeeds]) -> int:
        """Return how many nodes the tasks fill."""
        for count in range(1, len(tasks) + 1):
            nodes = [FreeNode(str(index), "", list(range(self.gpus_per_node))) for index in range(count)]
            try:
                divide(tasks, nodes)
            except ConfigError as error:
                problem = error
            else:
                return count
        raise ConfigError(f"launch.launcher.gpus_per_node is {self.gpus_per_node}: {problem}")

    # ---- inside an allocation ---------------------------------------------------------------------------------------

    def place(self, tasks: Sequence[TaskNeeds]) -> list[Place]:
        listed = os.environ.get("SLURM_JOB_NODELIST", "")  # such as gpu[01-04]
        names = output_of(["scontrol", "show", "hostnames", listed], COMMAND_S, "SLURM").split()
        nodes = [FreeNode(name, address_of(name, len(names)), list(range(self.gpus_per_node))) for name in names]
        self._places = divide(tasks, nodes)
        return self._places

    def call(self, index: int, command: Sequence[str], timeout_s: float) -> str:
        node = self._places[index].node
        return output_of([*self._srun(node), "--input=none", *command], timeout_s, node)

    def start(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], log: Path, grace_s: float
    ) -> RunningTask:
        place = self._places[index]
        return ChildTask([*self._srun(place.node), *node_command(command, place, grace_s)], environment, log)

    def _srun(self, node: str) -> list[str]:
        """Return the options of a step of one process that sees all of a node's part in the job, as other steps do."""
        options = ["--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap", "--cpu-bind=none", "--unbuffered"]
        return ["srun", *options, "--kill-on-bad-exit=1", "--export=ALL", *self.srun]


def address_of(name: str, num_nodes: int) -> str:
    """Return the address of a node: of the loopback interface where the job has one node.

    Raises:
        ConfigError: Its name leads to no address that other nodes reach.
    """
    if num_nodes == 1:
        return LOOPBACK
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(f"{name}: its name has no address here: {error}.") from error
    if is_loopback(f"//{address}"):
        raise ConfigError(
            f"{name}: its name stands for {address} here, which other nodes do not reach: correct /etc/hosts."
        )
    return address
