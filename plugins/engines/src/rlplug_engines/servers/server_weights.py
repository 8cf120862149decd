"""Sends weights to servers, through their backend's routes."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future

from rlplug.errors import RunError
from rlplug_engines.servers.backend import ServerBackend
from rlplug_engines.servers.http_client import HTTPClient, Server
from rlplug_engines.servers.process_group import Group, Rendezvous
from rlplug_engines.servers.weight_sender import TensorList, WeightSender


class ServerWeightSender(WeightSender):
    """Sends weights to the workers of all servers.

    Args:
        backend: The engine's.
        client: Calls the servers.
        num_workers: Processes that receive weights, of each URL.
        deadline_s: For joining, and for each bucket: ``rollout.sync_deadline_s``.
    """

    def __init__(
        self, backend: ServerBackend, client: HTTPClient, num_workers: dict[str, int], deadline_s: float
    ) -> None:
        super().__init__(list(num_workers), backend.device, deadline_s)
        self.engine = backend.labels.engine
        self._backend = backend
        self._client = client
        self._num_workers = num_workers

    def num_workers(self, url: str) -> int:
        return self._num_workers[url]

    def ask_to_join(self, url: str, rendezvous: Rendezvous) -> Future[None]:
        return self._client.spawn(self._backend.join(self._server(url), rendezvous))

    def join(self, address: str, port: int, world_size: int) -> Group:
        return self._backend.make_group(Rendezvous(address, port, 0, world_size), self._deadline_s)

    def remedy(self) -> str:
        return self._backend.join_remedy()

    def begin(self, url: str) -> None:
        self._client.spawn(self._backend.begin(self._server(url))).result()

    def ask_to_receive(self, url: str, tensors: TensorList, version: int) -> Future[None]:
        return self._client.spawn(self._backend.receive_weights(self._server(url), tensors, version))

    def finish(self) -> None:
        self._client.run_all(self._backend.finish(self._server(url)) for url in self._urls)

    def leave(self) -> None:
        for url in self._urls:
            with contextlib.suppress(RunError):  # a server that is gone has no group any more
                self._client.spawn(self._backend.leave(Server(self._client, url))).result()

    def _server(self, url: str) -> Server:
        return Server(self._client, url, self._deadline_s, "sync_deadline_s")
