"""State of a launched run, in files of its folder that all nodes see: for ``--status`` and ``--stop``."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from rlplug.errors import ConfigError

FOLDER: Final = "launch"
"""Folder of a run folder with the launcher's files and the logs of all roles."""
STATE: Final = "state.json"
STOP: Final = "stop"
"""File whose existence asks the driver to stop."""
ALIVE_S: Final = 5.0
"""Time in seconds between two signs of life of the driver."""
SILENT_S: Final = 30.0
"""Time in seconds after which a driver without a sign of life counts as gone."""
ENDED: Final = ("finished", "stopped", "failed")


@dataclass
class TaskState:
    """One row of the table of tasks."""

    name: str
    node: str
    gpus: str
    address: str
    state: str = "waiting"
    restarts: int = 0


@dataclass
class LaunchState:
    """State of the whole run."""

    launcher: str
    status: str = "starting"
    message: str = ""
    attempt: int = 0
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    updated: float = 0.0
    """``time.time()`` of the last sign of life."""
    tasks: list[TaskState] = field(default_factory=list)

    def write(self, run_folder: Path) -> None:
        """Write the state with a sign of life."""
        self.updated = time.time()
        file = run_folder / FOLDER / STATE
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=2))
        partial.replace(file)

    @classmethod
    def read(cls, run_folder: Path) -> LaunchState:
        """Read the state of a run.

        Raises:
            ConfigError: The folder is not that of a launched run.
        """
        file = run_folder / FOLDER / STATE
        try:
            found = json.loads(file.read_text())
            state = cls(**{**found, "tasks": [TaskState(**task) for task in found["tasks"]]})
            _require_types(state, *state.tasks)
            return state
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{file} cannot be read ({type(error).__name__}): name the folder of a run that rlplug launch started, "
                "such as runs/quickstart/001."
            ) from error

    @property
    def is_running(self) -> bool:
        """Whether the driver has not ended, as far as its signs of life say."""
        return self.status not in ENDED and time.time() - self.updated < SILENT_S

    def rows(self) -> list[Sequence[str]]:
        """Return the table of tasks."""
        return [(task.name, task.node, task.gpus, task.address, task.state) for task in self.tasks]

    def describe(self) -> str:
        """Return a line about the run."""
        where = f"driver: process {self.pid} on {self.host}"
        if self.status in ENDED:
            return f"{self.status}. {self.message}".rstrip()
        if not self.is_running:
            return f"the driver has ended without a word ({where}): rlplug launch --resume goes on"
        return f"{self.status}, attempt {self.attempt}, {where}"


def _require_types(*parts: LaunchState | TaskState) -> None:
    """Raise ``TypeError`` for a field of another type than its own: a file may come from anybody."""
    kinds: dict[Any, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
    for part in parts:
        for each in fields(part):
            value = getattr(part, each.name)
            if not isinstance(value, kinds.get(each.type, object)):
                raise TypeError(f"{each.name} is a {type(value).__name__}")


COLUMNS: Final = ("task", "node", "GPUs", "address", "state")


def ask_to_stop(run_folder: Path, timeout_s: float) -> LaunchState:
    """Ask the driver of a run to save and stop, and return the state in which it ended.

    Raises:
        ConfigError: The folder is not that of a launched run.
    """
    state = LaunchState.read(run_folder)
    if not state.is_running:
        return state
    (run_folder / FOLDER / STOP).touch()
    deadline = time.monotonic() + timeout_s
    while state.is_running and time.monotonic() < deadline:
        time.sleep(0.5)
        state = LaunchState.read(run_folder)
    return state
