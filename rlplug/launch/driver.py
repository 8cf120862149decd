"""The driver: starts servers, then trainers, watches all of them together, and stops them together."""

from __future__ import annotations

import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rlplug.distributed.checkpoint_files import list_checkpoints
from rlplug.distributed.durable_files import remove
from rlplug.errors import RunError
from rlplug.interfaces.launcher import LOST, Launcher, Place, RunningTask
from rlplug.launch.checks import check_nodes
from rlplug.launch.logs import LogReader, tail
from rlplug.launch.plan import LaunchPlan
from rlplug.launch.state import ALIVE_S, FOLDER, STOP, LaunchState, TaskState
from rlplug.observability.terminal import say

POLL_S: Final = 0.25
HEALTH_S: Final = 2.0
"""Time in seconds for the answer to a health check."""
HEALTH_EVERY_S: Final = 0.5
FAULT_GRACE_S: Final = 10.0
"""Time in seconds for tasks to end by themselves after a fault: ranks that wait for a dead one cannot save."""
SERVER_GRACE_S: Final = 5.0
KILL_S: Final = 10.0
"""Time in seconds in which a killed task is gone."""
USAGE: Final = 2
"""Exit status of ``rlplug fit`` for a configuration that is wrong, which no restart mends."""


class Fault(Exception):
    """A task failed; the message names its role, its node, and its last log lines."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final
        """Whether starting again cannot help."""


class Stopped(Exception):
    """The run was told to stop."""


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
    deadline: float | None = None
    """When a server that starts must be healthy, by ``time.monotonic()``."""
    next_health: float = 0.0

    @property
    def is_running(self) -> bool:
        return self.running is not None and self.status is None


@dataclass
class Driver:
    """Runs a plan until it has finished, is told to stop, or has failed too often.

    Args:
        plan: What runs.
        launcher: Starts it.
        name: The launcher's, for people.
        run_folder: The run's own folder, which exists and is on a file system that all nodes share.
        config_file: The configuration of ``rlplug fit``.
        checkpoint: Where the first attempt goes on from; ``None`` for a new run.
    """

    plan: LaunchPlan
    launcher: Launcher
    name: str
    run_folder: Path
    config_file: Path
    checkpoint: str | None = None
    tasks: list[Task] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = LaunchState(self.name)
        self._signals: list[int] = []
        self._next_sign = 0.0

    # ---- the whole run --------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run, and return the exit status: 0, 1 after a fault, 130 or 143 when the run was told to stop.

        Raises:
            ConfigError: A node lacks something.
        """
        remove(self.run_folder / FOLDER / STOP)
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        except BaseException as error:
            self._end_all(FAULT_GRACE_S)
            self._finish("failed", str(error) or type(error).__name__)
            raise
        finally:
            self.launcher.close()
            for number, handler in former.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        for attempt in range(1, self.plan.config.max_restarts + 2):
            try:
                self._attempt(attempt)
            except Stopped:
                say("stopping: the trainer saves first")
                self._stop()
                saved = list_checkpoints(self.run_folder)
                hint = (
                    f"Go on with: rlplug launch --resume {self.run_folder}" if saved else "There was nothing to save."
                )
                self._finish("stopped", hint)
                return 128 + (self._signals[0] if self._signals else signal.SIGTERM)
            except Fault as fault:
                began = time.monotonic()
                say((f"fault: {fault}", "red"))
                self._end_all(FAULT_GRACE_S)
                say(f"all tasks ended within {time.monotonic() - began:.0f} s")
                if fault.is_final or attempt > self.plan.config.max_restarts:
                    self._finish("failed", str(fault))
                    return 1
                say(f"restart {attempt} of launch.max_restarts {self.plan.config.max_restarts}")
            else:
                self._end_all(SERVER_GRACE_S)
                self._finish("finished", "")
                return 0
        raise AssertionError("the last attempt returns")

    def _attempt(self, attempt: int) -> None:
        """Start all tasks, and return when the trainer has finished.

        Raises:
            Fault: A task has failed.
            Stopped: The run was told to stop.
        """
        self.state.attempt, self.state.status = attempt, "starting"
        self._prepare(attempt)
        servers, trainers = self.tasks[self.plan.num_nodes :], self.tasks[: self.plan.num_nodes]
        for task in servers:
            self._start_server(task)
        while not all(task.row.state == "healthy" for task in servers):
            self._watch()
        address, port = trainers[0].place.address, trainers[0].port
        start = self._how_to_start()
        for task in trainers:
            environment = self.plan.trainer_environment(task.index, address, port, self.run_folder)
            urls = [self.plan.server_url(server.place, server.port) for server in servers]
            self._start(task, self.plan.trainer_command(start, urls), environment, self.plan.config.grace_s)
            task.row.state = "running"
        self.state.status = "running"
        self._next_sign = 0.0
        while not all(task.status == 0 for task in trainers):
            self._watch()

    def _prepare(self, attempt: int) -> None:
        """Place all tasks and check their nodes."""
        needs = self.plan.tasks()
        places = self.launcher.place(needs)
        token = self.run_folder / FOLDER / f"shared-{time.time_ns()}"
        token.touch()  # new, so that no node has it from a copy of the folder
        try:
            paths = [str(token), str(self.config_file), *self.plan.paths]
            ports = check_nodes(self.launcher, needs, places, paths, self.plan.wanted_ports(places))
        finally:
            token.unlink()
        self.tasks = []
        for index, (need, place, port) in enumerate(zip(needs, places, ports, strict=True)):
            log = self.run_folder / FOLDER / f"{need.name.replace(' ', '-')}.log"
            with log.open("a") as file:
                file.write(f"---- attempt {attempt} on {place.node}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
            address = f"{place.address}:{port}" if need.role == "server" or index == 0 else place.address
            row = TaskState(need.name, place.node, gpus_text(need.gpus, place), address)
            self.tasks.append(Task(index, row, place, port, log, LogReader(log)))
        self.state.tasks = [task.row for task in self.tasks]

    def _how_to_start(self) -> list[str]:
        """Return how the trainer's command begins; set aside the rows of an attempt that saved nothing."""
        has_checkpoints = bool(list_checkpoints(self.run_folder))
        if has_checkpoints and self.state.attempt > 1:
            return ["--resume", str(self.run_folder), "--ckpt_path", "newest-whole"]
        if not has_checkpoints:
            self._set_aside()
        where = [] if self.checkpoint is None else ["--ckpt_path", self.checkpoint]
        return ["--config", str(self.config_file), *where]

    def _set_aside(self) -> None:
        aside = self.run_folder / FOLDER / f"without-checkpoint-{self.state.attempt - 1}"
        for path in self.run_folder.iterdir():
            if path.name != FOLDER:
                aside.mkdir(exist_ok=True)
                path.replace(aside / path.name)

    # ---- tasks ----------------------------------------------------------------------------------------------------

    def _start(self, task: Task, command: Sequence[str], environment: dict[str, str], grace_s: float) -> None:
        task.status = None
        task.running = self.launcher.start(task.index, command, environment, task.log, grace_s)

    def _start_server(self, task: Task) -> None:
        assert self.plan.config.servers is not None
        command = self.plan.server_command(task.place, task.port)
        self._start(task, command, self.plan.server_environment(), SERVER_GRACE_S)
        task.row.state = "starting"
        task.deadline = time.monotonic() + self.plan.config.servers.start_deadline_s

    def _watch(self) -> None:
        """Wait a moment, then look at every task.

        Raises:
            Fault: A trainer has failed, or a server has failed too often.
            Stopped: The run was told to stop.
        """
        self._rest(POLL_S)
        if self._signals or (self.run_folder / FOLDER / STOP).exists():
            raise Stopped
        for task in self.tasks:
            self._poll(task)
            if task.row.name.startswith("server"):
                self._watch_server(task)
            elif task.status:
                raise Fault(describe(task), is_final=task.status == USAGE)

    def _watch_server(self, task: Task) -> None:
        assert self.plan.config.servers is not None
        if task.status is not None:
            if task.status == LOST or task.row.restarts == self.plan.config.max_restarts:
                raise Fault(describe(task))
            say(describe(task))
            task.row.restarts += 1
            say(f"{task.row.name} starts again; the trainer sends it the weights and the requests that are missing")
            self._start_server(task)
        elif task.deadline is not None and time.monotonic() >= task.next_health:
            task.next_health = time.monotonic() + HEALTH_EVERY_S
            if is_healthy(self.plan.server_url(task.place, task.port) + self.plan.config.servers.health):
                task.deadline, task.row.state = None, "healthy"
            elif time.monotonic() > task.deadline:
                limit = f"launch.servers.start_deadline_s {self.plan.config.servers.start_deadline_s:g} s"
                raise Fault(f"{task.row.name} on {task.place.node} was not healthy after {limit}.\n{tail(task.log)}")

    def _poll(self, task: Task) -> None:
        if task.is_running:
            assert task.running is not None
            task.status = task.running.poll()
            if task.status is not None:
                task.row.state = "finished" if task.status == 0 else ending(task.status)

    def _rest(self, seconds: float) -> None:
        """Show what the logs got, give a sign of life, and wait."""
        for task in self.tasks:
            for line in task.reader.new_lines(is_last=not task.is_running):
                say((f"[{task.row.name} {task.place.node}] ", "cyan"), line)
        if time.monotonic() >= self._next_sign:
            self.state.write(self.run_folder)
            self._next_sign = time.monotonic() + ALIVE_S
        time.sleep(seconds)

    # ---- the end --------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Let the trainer save while its servers run, then end these."""
        self._end(self.tasks[: self.plan.num_nodes], self.plan.config.grace_s, lambda: len(self._signals) > 1)
        self._end_all(SERVER_GRACE_S)

    def _end_all(self, seconds: float) -> None:
        """End all tasks that run, and wait until they are gone."""
        self._end(self.tasks, seconds, lambda: False)

    def _end(self, tasks: Sequence[Task], seconds: float, is_hurried: Callable[[], bool]) -> None:
        """End tasks with SIGTERM, and after some seconds, or at once when hurried, with SIGKILL."""
        for request, wait_s in (("terminate", seconds), ("kill", KILL_S)):
            for task in tasks:
                if task.is_running:
                    getattr(task.running, request)()
            deadline = time.monotonic() + wait_s
            while any(task.is_running for task in tasks) and time.monotonic() < deadline:
                self._rest(POLL_S)
                for task in tasks:
                    self._poll(task)
                if request == "terminate" and is_hurried():
                    break
        if left := [task for task in tasks if task.is_running]:
            names = ", ".join(f"{task.row.name} on {task.place.node}" for task in left)
            raise RunError(f"{names} did not end within {KILL_S:g} s of SIGKILL: look at the node.")

    def _finish(self, status: str, message: str) -> None:
        self._rest(0.0)
        self.state.status, self.state.message = status, message
        self.state.write(self.run_folder)
        say(self.state.describe() if status != "failed" else f"failed. Logs: {self.run_folder / FOLDER}")

    def _on_signal(self, number: int, frame: FrameType | None) -> Any:
        self._signals.append(number)


def is_healthy(url: str) -> bool:
    """Return whether a GET of ``url`` answers with 200."""
    try:
        with urllib.request.urlopen(url, timeout=HEALTH_S) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def ending(status: int) -> str:
    """Return how a task ended, from its exit status."""
    if status == LOST:
        return "was lost with its node"
    number = status - 128
    if number in set(signal.Signals):
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with status {status}"


def describe(task: Task) -> str:
    """Return how a task ended, where, and its last log lines."""
    assert task.status is not None
    return f"{task.row.name} on {task.place.node} {ending(task.status)}; the end of {task.log}:\n{tail(task.log)}"


def gpus_text(num_gpus: int, place: Place) -> str:
    """Return the GPUs of a task for the table."""
    if num_gpus == 0:
        return "none"
    return f"{num_gpus} of the node" if place.gpus is None else ",".join(map(str, place.gpus))
