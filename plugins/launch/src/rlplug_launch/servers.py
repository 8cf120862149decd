"""Engine servers of an attempt: started, listed for the trainer while they are healthy, and started again when lost."""

from __future__ import annotations

import contextlib
import http.client
import secrets
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from rlplug_engines.servers.server_list import ListedServer, write_server_list

from rlplug.distributed.child_process import tail
from rlplug.distributed.durable_files import own_bytes, remove
from rlplug.errors import ConfigError, RunError
from rlplug.observability.terminal import say
from rlplug_launch import listener
from rlplug_launch.config import ServersConfig
from rlplug_launch.launcher import LOST, Launcher, Place
from rlplug_launch.plan import LaunchPlan
from rlplug_launch.tasks import Task, gpus_text

HEALTH_S: Final = 2.0
"""Time in seconds for the answer to a health check."""
HEALTH_EVERY_S: Final = 0.5
HEALTHY_EVERY_S: Final = 30.0
"""Time in seconds between two health checks of a server that was healthy."""
PLACE_EVERY_S: Final = 5.0
"""Time in seconds between two questions for another place."""
SERVER_GRACE_S: Final = 5.0
LOST_STATE: Final = "lost"
HEALTHY: Final = "healthy"
SILENT: Final = "silent"
"""State of a server that was healthy, and did not answer its last health check."""
HOST: Final = "have the command listen on {host}, as the launcher's user and in no container of its own"
MOST_LOOKS: Final = 16


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none, as the trainer's client."""


_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
"""Opens URLs of the cluster, which the proxy of ``http_proxy`` may not reach. The trainer's client asks none either."""


class Fault(Exception):
    """A task failed; the message names its role, its node, and its last log lines."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final
        """Whether starting again cannot help."""


class Servers:
    """The servers of one attempt.

    While one starts again, the trainer carries on with the others. Each start has a port of its own, unless
    ``launch.servers.port`` fixes it, so that nobody takes a server without weights for the one before.

    Args:
        plan: Has their command.
        config: The section ``launch.servers``.
        launcher: Starts them.
        tasks: The servers.
        list_file: The list that the trainer reads.
        check: Checks the node of a task and returns a free port there; raises ``ConfigError`` or ``RunError``.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        config: ServersConfig,
        launcher: Launcher,
        tasks: Sequence[Task],
        list_file: Path,
        check: Callable[[Task], int],
    ) -> None:
        self._plan = plan
        self._config = config
        self._launcher = launcher
        self._tasks = tasks
        self._list_file = list_file
        self._check = check
        self._deadlines: dict[int, float] = {}
        """When each server that starts, or is silent, must be healthy, by ``time.monotonic()``."""
        self._next_looks: dict[int, float] = {}
        """When to ask for the health of a server, or for a place of one that is lost."""
        self._looks: dict[int, Future[bool]] = {}
        """Health checks that are under way, of servers that were healthy."""
        self._tokens: dict[int, str] = {}
        """What each server's file has once a process that was started here listens on its port."""
        self._pool = ThreadPoolExecutor(MOST_LOOKS, "health")
        self._listed: list[ListedServer] | None = None
        self._write_list()

    @property
    def are_ready(self) -> bool:
        """Whether the trainer can start: each server is healthy, or lost, and one that is lost may join later."""
        return all(task.row.state in (HEALTHY, LOST_STATE) for task in self._tasks)

    def url(self, task: Task) -> str:
        return self._plan.server_url(task.place, task.port)

    def start(self, task: Task) -> None:
        """Start a server."""
        task.status = None
        self._looks.pop(task.index, None)
        file, token = self._listens_file(task), secrets.token_hex(16)
        remove(file)
        self._tokens[task.index] = token
        command = [sys.executable, "-m", listener.__name__, task.place.address, str(task.port), str(file), token]
        command += self._plan.server_command(task.place, task.port)
        environment = self._plan.server_environment(self._listing(task))
        task.running = self._launcher.start(task.index, command, environment, task.log, SERVER_GRACE_S)
        task.row.state = "starting"
        self._deadlines[task.index] = time.monotonic() + self._config.start_deadline_s

    def watch(self, task: Task) -> None:
        """Look at a server, and start it again when it has ended.

        Raises:
            Fault: It failed too often or did not become healthy, or no other server is left.
        """
        if task.row.state == LOST_STATE:
            self._find_place(task)
        elif task.status is not None:
            self._write_list()
            if task.status == LOST:
                self._lose(task, task.describe())
            elif task.row.restarts == self._plan.config.max_restarts:
                raise Fault(task.describe())
            else:
                say(task.describe())
                self._restart(task)
        elif task.row.state in (HEALTHY, SILENT):
            self._look_again(task)
        elif task.index in self._deadlines:
            self._look_for_health(task)

    # ---- one server -----------------------------------------------------------------------------------------------

    def _look_for_health(self, task: Task) -> None:
        if not self._is_time(task, HEALTH_EVERY_S):
            return
        answers = is_healthy(self.url(task) + self._config.health)
        if answers and self._listens(task):
            remove(self._listens_file(task))
            del self._deadlines[task.index]
            task.row.state = HEALTHY
            self._write_list()
        elif time.monotonic() > self._deadlines[task.index]:
            limit = f"launch.servers.start_deadline_s {self._config.start_deadline_s:g} s"
            other = f" No process of its command answers on {task.row.address}: {HOST}." if answers else ""
            raise Fault(f"{task.row.name} on {task.place.node} was not healthy after {limit}.{other}\n{tail(task.log)}")

    def _listens_file(self, task: Task) -> Path:
        return self._list_file.with_name(f"{task.log.stem}.listens")

    def _listens(self, task: Task) -> bool:
        """Return whether a process of the server listens at its address, which another may have taken before it."""
        with contextlib.suppress(OSError, ValueError):
            return own_bytes(self._listens_file(task)) == self._tokens[task.index].encode()
        return False

    def _look_again(self, task: Task) -> None:
        """Note whether a server still answers, and end one that has not for ``start_deadline_s``."""
        look = self._looks.get(task.index)
        if look is None:
            if self._is_time(task, HEALTHY_EVERY_S):
                self._looks[task.index] = self._pool.submit(is_healthy, self.url(task) + self._config.health)
            return
        if not look.done():
            return
        del self._looks[task.index]
        if look.result():
            task.row.state = HEALTHY
            self._deadlines.pop(task.index, None)
            return
        task.row.state = SILENT
        limit_s = self._config.start_deadline_s
        if time.monotonic() > self._deadlines.setdefault(task.index, time.monotonic() + limit_s):
            del self._deadlines[task.index]
            limit = f"launch.servers.start_deadline_s {limit_s:g} s"
            say(f"{task.row.name} on {task.place.node} was silent for {limit}, and is ended")
            assert task.running is not None
            task.running.kill()  # it starts again, as one that has ended by itself

    def _restart(self, task: Task) -> None:
        """Start a server again at its place, or lose it when its node does not answer."""
        try:
            task.port = self._check(task)
        except (ConfigError, RunError) as problem:
            self._lose(task, f"{task.row.name} cannot start again: {problem}")
            return
        task.row.restarts += 1
        task.row.address = f"{task.place.address}:{task.port}"
        say(f"{task.row.name} starts again; the trainer sends what is missing to the others, and it joins them later")
        self.start(task)

    def _lose(self, task: Task, message: str) -> None:
        """Go on without a server whose node is lost.

        Raises:
            Fault: No other server is left.
        """
        task.row.state = LOST_STATE
        self._deadlines.pop(task.index, None)
        if all(other.row.state == LOST_STATE for other in self._tasks):
            raise Fault(message)
        say((message, "red"))
        say(f"the run goes on without {task.row.name}, which starts elsewhere when there is a place for it")

    def _find_place(self, task: Task) -> None:
        """Start a lost server elsewhere, if the launcher has a place by now."""
        if task.row.restarts >= self._plan.config.max_restarts or not self._is_time(task, PLACE_EVERY_S):
            return
        try:
            place = self._launcher.replace(task.index)
            if place is None:
                return
            self._move(task, place)
            task.port = self._check(task)
        except (ConfigError, RunError) as problem:
            task.row.restarts = self._plan.config.max_restarts  # another try would say the same
            say((f"{task.row.name} cannot start elsewhere, and the run goes on without it: {problem}", "red"))
            return
        task.row.restarts += 1
        task.row.address = f"{place.address}:{task.port}"
        say(f"{task.row.name} starts again on {place.node}, and joins the others at a weight sync")
        self.start(task)

    def _move(self, task: Task, place: Place) -> None:
        task.place = place
        task.row.node = place.node
        task.row.gpus = gpus_text(self._config.gpus, place)

    def _is_time(self, task: Task, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._next_looks.get(task.index, 0.0):
            return False
        self._next_looks[task.index] = now + every_s
        return True

    def _listing(self, task: Task) -> ListedServer:
        return ListedServer(self.url(task), task.row.restarts)

    def _write_list(self) -> None:
        """Tell the trainer which servers are healthy."""
        listed = [self._listing(task) for task in self._tasks if task.row.state in (HEALTHY, SILENT)]
        if listed != self._listed:
            write_server_list(self._list_file, listed)
            self._listed = listed


def is_healthy(url: str) -> bool:
    """Return whether a GET of ``url`` answers with 200."""
    try:
        with _OPENER.open(url, timeout=HEALTH_S) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException, ValueError):
        return False
