"""The driver: starts servers, then trainers, watches all of them together, and stops them together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rlplug.distributed.checkpoints.files import list_checkpoints
from rlplug.distributed.durable_files import own_file, remove
from rlplug.errors import RunError
from rlplug.observability.terminal import say
from rlplug_launch.checks import check_node, check_nodes
from rlplug_launch.launcher import Launcher
from rlplug_launch.logs import LogReader
from rlplug_launch.plan import LaunchPlan
from rlplug_launch.servers import SERVER_GRACE_S, Fault, Servers
from rlplug_launch.state import ALIVE_S, FOLDER, STOP, LaunchState, TaskState
from rlplug_launch.tasks import Task, gpus_text

POLL_S: Final = 0.25
FAULT_GRACE_S: Final = 10.0
"""Time in seconds for tasks to end by themselves after a fault: ranks that wait for a dead one cannot save."""
KILL_S: Final = 10.0
"""Time in seconds in which a killed task is gone."""
USAGE: Final = 2
"""Exit status of ``rlplug fit`` for a configuration that is wrong, which no restart mends."""


class Stopped(Exception):
    """The run was told to stop."""


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
        self._servers: Servers | None = None
        self._list_file = self.run_folder.absolute() / FOLDER / "servers.json"
        self._first_checkpoints = self._dated_checkpoints()

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
        self.plan = self.plan.with_new_key()
        self._prepare(attempt)
        trainers, servers = self.tasks[: self.plan.num_nodes], self.tasks[self.plan.num_nodes :]
        self._servers = None
        if self.plan.config.servers is not None:
            self._servers = Servers(
                self.plan, self.plan.config.servers, self.launcher, servers, self._list_file, self._checked_port
            )
            for task in servers:
                self._servers.start(task)
            while not self._servers.are_ready:
                self._watch()
        address, port = trainers[0].place.address, trainers[0].port
        start = self._how_to_start()
        for task in trainers:
            environment = self.plan.trainer_environment(task.index, address, port, self.run_folder, self._list_file)
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
        with self._needed_paths() as paths:
            ports = check_nodes(self.launcher, needs, places, paths, self.plan.wanted_ports(places))
        self.tasks = []
        for index, (need, place, port) in enumerate(zip(needs, places, ports, strict=True)):
            log = self.run_folder / FOLDER / f"{need.name.replace(' ', '-')}.log"
            with open(log, "a", opener=own_file) as file:
                file.write(f"---- attempt {attempt} on {place.node}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
            address = f"{place.address}:{port}" if need.role == "server" or index == 0 else place.address
            row = TaskState(need.name, place.node, gpus_text(need.gpus, place), address)
            self.tasks.append(Task(index, row, place, port, log, LogReader(log)))
        self.state.tasks = [task.row for task in self.tasks]

    @contextmanager
    def _needed_paths(self) -> Iterator[list[str]]:
        """Yield what each node must have: also a file that is new, so that none has it from a copy of the folder."""
        token = self.run_folder / FOLDER / f"shared-{time.time_ns()}"
        token.touch()
        try:
            yield [str(token), str(self.config_file), *self.plan.paths]
        finally:
            token.unlink()

    def _checked_port(self, task: Task) -> int:
        """Check the node of a server that starts again, and return the port that it gets."""
        assert self.plan.config.servers is not None
        need, wanted = self.plan.tasks()[task.index], task.port if self.plan.config.servers.port else 0
        with self._needed_paths() as paths:
            return check_node(self.launcher, task.index, need, task.place, paths, wanted)

    def _how_to_start(self) -> list[str]:
        """Return how the trainer's command begins; set aside the rows of an attempt that saved nothing.

        A run that is resumed begins as the first attempt did until it has written a checkpoint or set newer ones
        aside. Only by then are the options that were given now in the configuration that ``--resume`` reads.
        """
        found = self._dated_checkpoints()
        is_as_before = self.checkpoint is not None and found == self._first_checkpoints
        if found and self.state.attempt > 1 and not is_as_before:
            return ["--resume", str(self.run_folder), "--ckpt_path", "newest-whole"]
        if not found:
            self._set_aside()
        where = [] if self.checkpoint is None else ["--ckpt_path", self.checkpoint]
        return ["--config", str(self.config_file), *where]

    def _dated_checkpoints(self) -> list[tuple[str, int]]:
        """Return the run's checkpoints with the times of their folders: one of the same step may be written anew."""
        return [(path.name, path.stat().st_mtime_ns) for path in list_checkpoints(self.run_folder)]

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
            task.poll()
            if task.index >= self.plan.num_nodes:
                assert self._servers is not None
                self._servers.watch(task)
            elif task.status:
                raise Fault(task.describe(), is_final=task.status == USAGE)

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
                    task.poll()
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
