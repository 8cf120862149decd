"""Servers as processes of this host: started, supervised, and ended with the trainer."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from lightning.pytorch.utilities import rank_zero_info

from rlplug.distributed.child_process import ChildProcess, tail
from rlplug.errors import RunError
from rlplug.interfaces import EngineFault
from rlplug_engines.colocated.environment import is_trainer_variable
from rlplug_engines.servers import supervisor
from rlplug_engines.servers.addresses import LOOPBACK, free_ports, listens
from rlplug_engines.servers.http_client import HTTPClient

POLL_S: Final = 0.5
PROGRESS_S: Final = 15.0
STOPPED: Final = "{name} is waited for no longer: the run is told to stop."


@dataclass(frozen=True)
class ServerSlot:
    """Port, key and folder of a server that is started."""

    port: int
    """On the loopback interface."""
    key: str
    """Bearer token that every route but ``/health`` must require."""
    folder: Path
    """Readable by this user alone; for its log, and for secrets, which must not be on its command line. It is removed
    when the server is ended, and stays when the server ends by itself."""


@dataclass(frozen=True)
class Launch:
    """Command and environment of a server."""

    command: Sequence[str]
    environment: Mapping[str, str | None]
    """Variables beside the trainer's own; ``None`` removes one."""


def to_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as flags of a command line, in the form of argparse.

    ``max_len: 8`` is ``--max-len=8``, a list follows its flag, a dict is JSON, ``False`` is ``--no-...``, and ``None``
    is left out.
    """
    flags: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            flags += [flag, *map(str, value)]
        elif value is not None:
            flags.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


@dataclass(frozen=True)
class ServerProcess:
    """One server and its log."""

    url: str
    key: str = field(repr=False)
    log: Path
    supervisor: ChildProcess


class ServerProcesses:
    """Servers that run until ``close``, and no longer than this process.

    Args:
        name: The engine's, for messages.
        launch: Returns the command of a server.
        devices: ``CUDA_VISIBLE_DEVICES`` of each server; ``None`` for a server on the CPU.
        noise: Beginnings of lines of a log that do not explain its end.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[ServerSlot], Launch],
        devices: Sequence[str | None],
        noise: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self._noise = noise
        self._servers: list[ServerProcess] = []
        for index, (port, seen) in enumerate(zip(free_ports(len(devices)), devices, strict=True)):
            folder = Path(tempfile.mkdtemp(prefix=f"rlplug-server-{index}-"))
            key = secrets.token_hex(32)
            launched = launch(ServerSlot(port, key, folder))
            log = folder / "server.log"
            command = [sys.executable, supervisor.__file__, str(os.getpid()), str(folder), *launched.command]
            process = ChildProcess(command, log, env=_environment(launched.environment, seen))
            self._servers.append(ServerProcess(f"http://{LOOPBACK}:{port}", key, log, process))

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    @property
    def keys(self) -> dict[str, str]:
        """The key of each server by its URL: who takes the port of one that has ended gets no other's."""
        return {server.url: server.key for server in self._servers}

    @property
    def pids(self) -> list[int]:
        """Ids of the processes below which each server runs."""
        return [server.supervisor.pid for server in self._servers]

    def problem(self, wait_s: float = 0.0) -> str:
        """Return the status and the log of a server that ended, waiting for one; an empty string when all run."""
        deadline = time.monotonic() + wait_s
        while True:
            for server in self._servers:
                if server.supervisor.poll() is not None:
                    return (
                        f"The server {server.url} ended with status {server.supervisor.returncode}; the end of its log "
                        f"{server.log}:\n{tail(server.log, noise=self._noise)}"
                    )
            if time.monotonic() >= deadline:
                return ""
            time.sleep(0.1)

    def listens(self, url: str) -> bool:
        """Return whether a process of the server listens at its address, and not one of somebody else.

        Ports are on command lines, which all users of a host may read, and are free until the server binds its own.
        """
        pid = next(server.supervisor.pid for server in self._servers if server.url == url)
        return listens(pid, LOOPBACK, urlsplit(url).port)

    def logs(self) -> str:
        """Return the paths of the logs."""
        return ", ".join(str(server.log) for server in self._servers)

    def log_of(self, url: str) -> str:
        """Return the end of a server's log."""
        return next(tail(server.log, noise=self._noise) for server in self._servers if server.url == url)

    def close(self) -> None:
        """End all servers and wait until their processes are gone."""
        for server in self._servers:
            server.supervisor.terminate()
        for server in self._servers:
            try:
                server.supervisor.wait(2 * supervisor.GRACE_S)
            except subprocess.TimeoutExpired:
                server.supervisor.kill()
                server.supervisor.wait()
        self._servers = []


def _environment(changes: Mapping[str, str | None], devices: str | None) -> dict[str, str]:
    environment: dict[str, str | None] = {n: v for n, v in os.environ.items() if not is_trainer_variable(n)}
    environment |= changes
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    return {name: value for name, value in environment.items() if value is not None}


def wait_until_healthy(
    name: str,
    client: HTTPClient,
    urls: Sequence[str],
    deadline_s: float,
    processes: ServerProcesses | None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until servers answer their health check; those of this process are given no key before.

    Args:
        name: The engine's, for messages.
        processes: Those of them that this process started.
        is_stopping: Returns whether the run is told to stop.

    Raises:
        EngineFault: The run is told to stop.
        RunError: One has ended, or is not healthy by the deadline.
    """
    began = time.monotonic()
    next_line = PROGRESS_S
    for url in urls:
        while not (client.is_healthy(url) and (processes is None or processes.listens(url))):
            if processes is not None and (problem := processes.problem()):
                raise RunError(f"{name} did not start. {problem}")
            if is_stopping():
                raise EngineFault(STOPPED.format(name=name))
            seconds = time.monotonic() - began
            if seconds > deadline_s:
                hint = (
                    "Does it run, and is the address right?"
                    if processes is None
                    else f"The end of its log:\n{processes.log_of(url)}"
                )
                raise RunError(
                    f"{name} on {url} was not healthy after rollout.start_deadline_s {deadline_s:g} s. {hint}"
                )
            if seconds > next_line:
                rank_zero_info(f"waiting for {name} on {url.partition('//')[2]}, {seconds:.0f} s")
                next_line += PROGRESS_S
            time.sleep(POLL_S)
