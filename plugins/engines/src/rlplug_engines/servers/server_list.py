"""The engine servers that run, in a file that a launcher keeps up to date while a run goes on."""

from __future__ import annotations

import hmac
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from rlplug.distributed.durable_files import write_file
from rlplug.errors import RunError
from rlplug.interfaces import EngineFault
from rlplug_engines.servers.http_client import HTTPClient
from rlplug_engines.servers.processes import POLL_S, STOPPED

FILE_VARIABLE: Final = "RLPLUG_SERVERS_FILE"
"""Environment variable with the path of the file; without it the servers of ``rollout.urls`` stay the same."""


@dataclass(frozen=True)
class ListedServer:
    """A server that is ready for requests."""

    url: str
    start: int
    """How often it was started before: another start at the same URL has neither weights nor process group."""


def key_of_server(key: str, server: ListedServer) -> str:
    """Return the key of a launcher's server, which follows from the run's: each start of each has another."""
    return hmac.digest(key.encode(), f"{server.start} {server.url}".encode(), "sha256").hex() if key else ""


def keys_of_servers(key: str, servers: Sequence[ListedServer]) -> dict[str, str]:
    """Return the key of each of a launcher's servers by its URL."""
    return {server.url: key_of_server(key, server) for server in servers}


def write_server_list(file: Path, servers: Sequence[ListedServer]) -> None:
    """Replace the list in one step, so that no reader sees a part of it."""
    write_file(file, json.dumps([asdict(server) for server in servers]))


def read_server_list(file: Path) -> list[ListedServer]:
    """Return the servers that are ready; none while all of them start.

    Raises:
        RunError: The file cannot be read, or is not such a list.
    """
    try:
        servers = [ListedServer(str(each["url"]), int(each["start"])) for each in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(
            f"the launcher's list of servers {file} ({FILE_VARIABLE}) cannot be read: {type(error).__name__}: {error}. "
            "It is on the run folder's file system, which all nodes must share."
        ) from error
    if wrong := next((each.url for each in servers if not each.url.startswith(("http://", "https://"))), None):
        raise RunError(f"the launcher's list of servers {file} ({FILE_VARIABLE}) has {wrong!r}, which is no URL.")
    return servers


class ServerList:
    """The servers of a launcher that an engine uses.

    Args:
        file: The launcher's list.
        engine: The engine's name, for messages.
    """

    def __init__(self, file: Path, engine: str) -> None:
        self._file = file
        self._engine = engine
        self.servers: list[ListedServer] = []
        """Those that the engine uses."""

    @classmethod
    def of_launcher(cls, engine: str) -> ServerList | None:
        """Return the list that a launcher keeps for this process, if one does."""
        file = os.environ.get(FILE_VARIABLE)
        return cls(Path(file), engine) if file else None

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def read(self) -> list[ListedServer]:
        """Return the servers that are listed now; errors are those of :func:`read_server_list`."""
        return read_server_list(self._file)

    def check_unchanged(self) -> None:
        """Check that no server of the engine ended, or started again without the weights.

        Raises:
            EngineFault: One did.
        """
        if lost := set(self.servers) - set(self.read()):
            urls = ", ".join(sorted(server.url for server in lost))
            raise EngineFault(f"{self._engine} on {urls} ended or was lost with its node.")

    def wait_until_healthy(self, client: HTTPClient, deadline_s: float, is_stopping: Callable[[], bool]) -> None:
        """Take the servers of the list, once there are some and all of them answer. Collective.

        Args:
            is_stopping: Returns whether the run is told to stop; the first rank's decides.

        Raises:
            EngineFault: The run is told to stop: its servers may never come.
            RunError: That took longer than the deadline, or the list cannot be read.
        """
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        deadline = time.monotonic() + deadline_s
        while True:
            found = from_rank_zero(self._healthy(client) if is_first else None)
            if isinstance(found, str):
                raise RunError(found)
            if found:
                self.servers = found
                return
            if from_rank_zero(is_stopping()):
                raise EngineFault(STOPPED.format(name=self._engine))
            # the first rank's clock decides, so that no rank waits alone
            if from_rank_zero(time.monotonic() > deadline):
                raise RunError(
                    f"{self._engine}: the servers in {self._file} were not healthy after rollout.start_deadline_s "
                    f"{deadline_s:g} s."
                )
            time.sleep(POLL_S)

    def _healthy(self, client: HTTPClient) -> list[ListedServer] | str:
        """Return the listed servers if all are healthy; else an empty list, or what is wrong with the list."""
        try:
            listed = self.read()
        except RunError as problem:
            return str(problem)
        return listed if all(client.is_healthy(server.url) for server in listed) else []


def from_rank_zero(value: Any) -> Any:
    """Return the value that the trainer's first rank gives. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
