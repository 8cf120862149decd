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

import psutil

from rlplug.distributed.durable_files import own_bytes, write_file
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
LOOK_S: Final = 0.5
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
    """``time.time()`` of the last sign of life, by the clock of the driver's host."""
    tasks: list[TaskState] = field(default_factory=list)

    def write(self, run_folder: Path) -> None:
        """Write the state with a sign of life."""
        self.updated = time.time()
        write_file(run_folder / FOLDER / STATE, json.dumps(asdict(self), indent=2))

    @classmethod
    def read(cls, run_folder: Path) -> LaunchState:
        """Read the state of a run.

        Raises:
            ConfigError: The folder is not that of a launched run.
        """
        file = run_folder / FOLDER / STATE
        try:
            found = json.loads(own_bytes(file))
            state = cls(**{**found, "tasks": [TaskState(**task) for task in found["tasks"]]})
            _require_types(state, *state.tasks)
            return state
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{file} cannot be read ({type(error).__name__}): name the folder of a run that rlplug launch started, "
                "such as runs/quickstart/001."
            ) from error

    @property
    def has_ended(self) -> bool:
        """Whether the driver said that it ended."""
        return self.status in ENDED

    def rows(self) -> list[Sequence[str]]:
        """Return the table of tasks."""
        return [(task.name, task.node, task.gpus, task.address, task.state) for task in self.tasks]

    def describe(self, is_alive: bool = True) -> str:
        """Return a line about the run; ``is_alive`` says whether its driver gives signs of life."""
        where = f"driver: process {self.pid} on {self.host}"
        if self.has_ended:
            return f"{self.status}. {self.message}".rstrip()
        if not is_alive:
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


def is_alive(run_folder: Path) -> bool:
    """Return whether the driver of a run works on.

    Clocks of two hosts differ. So a driver elsewhere is alive when its next sign of life comes, within ``ALIVE_S``, and
    gone when none comes in ``SILENT_S``.

    Raises:
        ConfigError: The folder is not that of a launched run.
    """
    state = LaunchState.read(run_folder)
    if state.has_ended:
        return False
    if state.host == socket.gethostname():
        if 0 <= time.time() - state.updated < SILENT_S:
            return True
        if not psutil.pid_exists(state.pid):
            return False
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        if (now := LaunchState.read(run_folder)).updated != state.updated:
            return not now.has_ended
    return False


def ask_to_stop(run_folder: Path, timeout_s: float) -> LaunchState:
    """Ask the driver of a run to save and stop, and return the state in which it ended, or was last seen.

    Raises:
        ConfigError: The folder is not that of a launched run.
    """
    state = LaunchState.read(run_folder)
    if not is_alive(run_folder):
        return state
    (run_folder / FOLDER / STOP).touch()
    seen = began = time.monotonic()
    while not state.has_ended and time.monotonic() < min(began + timeout_s, seen + SILENT_S):
        time.sleep(LOOK_S)
        former, state = state, LaunchState.read(run_folder)
        if state.updated != former.updated:
            seen = time.monotonic()
    return state
