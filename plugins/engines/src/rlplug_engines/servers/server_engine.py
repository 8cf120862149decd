"""``ServerEngine``: a rollout engine in server processes, which it starts, or which run already at URLs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from lightning.pytorch.utilities import rank_zero_info

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import Bucket, EngineFault, Placement, PolicySpec, RolloutEngine, ScrapeTargets, SyncReport
from rlplug.rollout.context_limit import max_completion_tokens
from rlplug.types import NO_VERSION, Completion, Request, SamplingParams
from rlplug.weight_sync.buckets import drain
from rlplug.weight_sync.manifest import policy_weights
from rlplug.weight_sync.receive_checks import WeightSyncValidator
from rlplug_engines.colocated.options import EngineOptions, deciding_options
from rlplug_engines.colocated.stats import EngineStats
from rlplug_engines.fp8_engine_checks import check_fp8_fits
from rlplug_engines.servers.api_processes import APIProcesses
from rlplug_engines.servers.backend import BackendContext, PendingRequest, ServerBackend, ServerSettings
from rlplug_engines.servers.http_client import HTTPClient, Server
from rlplug_engines.servers.processes import ServerProcesses, wait_until_healthy
from rlplug_engines.servers.requests import ServerRequests
from rlplug_engines.servers.scheduler_metrics import SchedulerMetrics
from rlplug_engines.servers.server_checks import changed_options, check_urls, devices_of_servers, reading
from rlplug_engines.servers.server_list import ListedServer, ServerList, from_rank_zero, keys_of_servers
from rlplug_engines.servers.server_weights import ServerWeightSender

DIAGNOSIS_S: Final = 3.0
"""Time that a fault waits for a server's end, whose log explains it."""


class ServerEngine(RolloutEngine):
    """Generates in server processes, on GPUs of their own.

    A subclass names its ``backend_class``, and makes the backend's options of what a user sets.

    Under a launcher, which lists the servers that run, those at URLs may change
    (:class:`~rlplug_engines.servers.server_list.ServerList`). A server that is lost is a fault, and the engine starts
    again with those that are listed then. A server that is added takes part from the next weight sync on.

    Args:
        options: Of servers that are started here.
        gpus: GPUs for the servers, as indices among the GPUs that the trainer sees.
        urls: Of servers that run already.
        api_key_env: Environment variable of the key of ``urls``.
        start_deadline_s: Longest time for servers to become healthy, in seconds.
        request_deadline_s: Longest time in which a server answers none of its requests.
        sync_deadline_s: Longest time for each bucket of weights, in seconds.
        data_parallel_size: Copies of the model behind each server that is started here.
    """

    backend_class: ClassVar[type[ServerBackend]]
    options: Any
    """The backend's, for servers that are started here: a dataclass with ``tensor_parallel_size``; at its defaults with
    ``urls``."""

    def __init__(
        self,
        options: Any,
        gpus: list[int] | None,
        urls: list[str] | None,
        api_key_env: str,
        start_deadline_s: float,
        request_deadline_s: float,
        sync_deadline_s: float,
        data_parallel_size: int = 1,
    ) -> None:
        self.options = options
        self.gpus = gpus
        self.urls = None if urls is None else [url.rstrip("/") for url in urls]
        self.api_key_env = api_key_env
        self.start_deadline_s = start_deadline_s
        self.request_deadline_s = request_deadline_s
        self.sync_deadline_s = sync_deadline_s
        self.data_parallel_size = data_parallel_size
        self.deciding_options = deciding_options(options)
        self._labels = self.backend_class.labels
        self._processes: ServerProcesses | None = None
        self._client: HTTPClient | None = None
        self._sender: ServerWeightSender | None = None
        self._metrics: SchedulerMetrics | None = None
        self._api: APIProcesses | None = None
        """Measured on the first rank, for servers that were started here, where the labels name such processes."""
        self._max_model_len: int | None = None
        """Of the server with the shortest context, once they run."""
        self._version = NO_VERSION
        self._list = None if urls is None else ServerList.of_launcher(self._labels.engine)
        if self.urls is not None:
            beside = {"gpus": gpus is not None, "data_parallel_size": data_parallel_size != 1}
            also_set = changed_options(options) | {name for name, is_set in beside.items() if is_set}
            check_urls(self.urls, api_key_env, self._labels, also_set)

        keys, self._context_key = self._labels.keys, self._labels.context_key
        if isinstance(options, EngineOptions):
            keys, self._context_key = options.advice_keys(), options.written(self._context_key)
        self._keys = keys if urls is None else keys.of_servers()
        self.context_key = f"rollout.{self._context_key}" if urls is None else f"{self._context_key} of the servers"

    def check(self, policy: PolicySpec) -> None:
        check_fp8_fits(type(self).__name__, policy, self.options.tensor_parallel_size)

    def max_context(self, policy: PolicySpec) -> int:
        if self._max_model_len is not None:
            return min(self._max_model_len, policy.max_context)
        return self.options.longest(policy) if isinstance(self.options, EngineOptions) else policy.max_context

    def size_options(self, policy: PolicySpec, requests: int, prompt_tokens: int) -> dict[str, Any]:
        if self.urls is not None or not isinstance(self.options, EngineOptions):
            return {}
        return self.options.changes_for(policy, requests, prompt_tokens)

    # ---- start and close ------------------------------------------------------------------------------------------

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        self._policy, self._placement = policy, placement
        context = BackendContext(policy, placement.device, self.urls is None, self.data_parallel_size)
        self._backend = self.backend_class(self.options, context)
        self._weights = policy_weights(policy)
        on_gpus = placement.device.type == "cuda" and self.urls is None
        size = self.options.tensor_parallel_size * self.data_parallel_size
        devices = devices_of_servers(self.gpus, size, placement, self._labels) if on_gpus else [None]
        try:
            if self.urls is None and placement.rank == 0:
                engine = self._labels.engine
                self._processes = ServerProcesses(engine, self._backend.launch, devices, self._labels.noise)
                rank_zero_info(f"starting {engine} on {', '.join(self._processes.urls)}, log: {self._processes.logs()}")
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        urls, keys, key_name = self._where()
        client = self._client = HTTPClient(keys, key_name, self._labels.server_key)
        if self._list is None:
            engine, deadline_s = self._labels.engine, self.start_deadline_s
            wait_until_healthy(engine, client, urls, deadline_s, self._processes, self.is_stopping)
        else:
            self._list.wait_until_healthy(client, self.start_deadline_s, self.is_stopping)
            urls = self._list.urls
            client.add_keys(self._listed_keys(self._list.servers))
        backend, servers, rank = self._backend, [Server(client, url) for url in urls], self._placement.rank
        settings = client.run_all(map(self._settings, servers))
        labels, on_gpu = self._labels, self._placement.device.type == "cuda"
        self._stats = EngineStats(0, 0, self._keys if on_gpu else replace(self._keys, idle_memory="", prefill=""))
        self._use_settings(settings)
        requests = self._requests = ServerRequests(backend, client, urls, rank, self.request_deadline_s, self._stats)
        if rank == 0:
            self._metrics = SchedulerMetrics(backend, servers, self._stats, lambda: requests.is_busy)
            client.spawn(self._metrics.run())
            if self._processes is not None and labels.api_processes:
                self._api = APIProcesses(self._processes.pids, labels.api_processes)
            self._sender = self._connected_sender(urls, settings)

    def _use_settings(self, settings: Sequence[ServerSettings]) -> None:
        self._max_model_len = min(each.max_model_len for each in settings)
        self._stats.max_num_seqs = sum(each.max_num_seqs for each in settings)
        self._stats.kv_cache_tokens = sum(each.kv_cache_tokens for each in settings)
        self._stats.copies = sum(each.copies for each in settings)
        self._stats.max_num_batched_tokens = min(each.max_num_batched_tokens for each in settings)
        self._stats.largest_graph = min(each.largest_graph for each in settings)

    def _connected_sender(self, urls: Sequence[str], settings: Sequence[ServerSettings]) -> ServerWeightSender:
        """Form the group of this process and the workers of all servers.

        Raises:
            EngineFault: A server of a launcher went away meanwhile.
            RunError: A server cannot join.
        """
        assert self._client is not None
        num_workers = {url: each.num_workers for url, each in zip(urls, settings, strict=True)}
        sender = ServerWeightSender(self._backend, self._client, num_workers, self.sync_deadline_s)
        try:
            sender.connect()
        except RunError as problem:
            sender.close()
            if self._list is not None and not all(map(self._client.is_healthy, urls)):
                raise EngineFault(str(problem)) from problem
            raise
        return sender

    def _follow_list(self) -> None:
        """Form the group anew when a launcher lists other servers than before. Collective.

        Raises:
            EngineFault: A server of the new list did not join.
        """
        if self._list is None:
            return
        found = from_rank_zero(self._join_listed() if self._placement.rank == 0 else None)
        if isinstance(found, str):
            raise EngineFault(found)
        if found is not None:
            self._list.servers, settings = found
            assert self._client is not None
            self._client.add_keys(self._listed_keys(self._list.servers))
            self._use_settings(settings)
            self._requests.use(self._list.urls)

    def _join_listed(self) -> tuple[list[ListedServer], list[ServerSettings]] | str | None:
        """Return the new servers and their settings, ``None`` when they are the same, or what failed."""
        assert self._list is not None
        assert self._client is not None
        assert self._metrics is not None
        try:
            listed = self._list.read()
            if listed == self._list.servers:
                return None
            if not listed:
                return "The launcher lists no server: all of them start again."
            urls = [server.url for server in listed]
            rank_zero_info(f"{self._labels.engine} now runs on {', '.join(urls)}")
            self._leave()
            self._client.add_keys(self._listed_keys(listed))
            servers = [Server(self._client, url) for url in urls]
            settings = self._client.run_all(map(self._settings, servers))
            self._sender = self._connected_sender(urls, settings)
        except RunError as problem:
            return str(problem)
        self._metrics.use(servers)
        return listed, settings

    def _leave(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.leave()
            sender.close()

    async def _settings(self, server: Server) -> ServerSettings:
        with reading(server.url):
            return await self._backend.settings(server)

    def _listed_keys(self, servers: Sequence[ListedServer]) -> dict[str, str]:
        """Return the keys of a launcher's servers, by their URLs."""
        return keys_of_servers(os.environ.get(self.api_key_env, ""), servers)

    def _where(self) -> tuple[list[str], dict[str, str], str]:
        """Return the servers' URLs, their keys by these, and where they come from; the same on all ranks."""
        if self.urls is not None:
            given = "" if self._list is not None else os.environ.get(self.api_key_env, "")
            return self.urls, dict.fromkeys(self.urls, given), f"{self.api_key_env} (rollout.api_key_env)"
        mine = None if self._processes is None else (self._processes.keys, socket.gethostname())
        keys, host = from_rank_zero(mine)
        if host != socket.gethostname():
            raise ConfigError(
                f"the servers run on {host} for ranks of that host alone, and rank {self._placement.rank} is on "
                f"{socket.gethostname()}: start servers yourself, and set rollout.urls."
            )
        return list(keys), keys, "the servers' environment"

    def scrape_targets(self) -> ScrapeTargets | None:
        if self._processes is not None:
            keys = self._processes.keys
            return ScrapeTargets(self._labels.engine, tuple(keys), True, tuple(keys.values()))
        if self._list is not None:
            keys = self._listed_keys(self._list.servers)
            return ScrapeTargets(self._labels.engine, tuple(keys), any(keys.values()), tuple(keys.values()))
        needs_key = bool(os.environ.get(self.api_key_env))
        return None if self.urls is None else ScrapeTargets(self._labels.engine, tuple(self.urls), needs_key)

    def close(self) -> None:
        client, self._client = self._client, None
        sender, self._sender = self._sender, None
        processes, self._processes = self._processes, None
        self._metrics = self._api = self._max_model_len = None
        if sender is not None and processes is None:
            sender.leave()
        if client is not None:
            client.close()
        if processes is not None:
            processes.close()
        if sender is not None:
            sender.close()

    # ---- generation -----------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        pending = self._pending(requests, sampling, is_streamed=False)
        try:
            self._check_listed()
            self._requests.is_stopping = self.is_stopping
            return self._requests.generate(pending)
        except EngineFault as fault:
            raise self._explained(fault) from fault

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self._check_listed()
        self._streaming().submit(self._pending(requests, sampling, is_streamed=True))

    def collect(self, timeout_s: float) -> list[Completion]:
        try:
            return self._streaming().collect(timeout_s)
        except EngineFault as fault:
            raise self._explained(fault) from fault

    def abort(self, request_ids: Sequence[str]) -> None:
        self._streaming().abort(request_ids)

    def _streaming(self) -> ServerRequests:
        if not self.capabilities.streaming:
            raise self._cannot("streaming")
        return self._requests

    def _pending(
        self, requests: Sequence[Request], sampling: SamplingParams, is_streamed: bool
    ) -> list[PendingRequest]:
        context = self.max_context(self._policy)

        def one(request: Request) -> PendingRequest:
            fits = max_completion_tokens(request, self._policy, context, self._context_key)
            max_tokens, vocab_size = min(request.limit(sampling), fits), self._policy.vocab_size
            return PendingRequest(request, sampling, max_tokens, self._version, is_streamed, vocab_size)

        return [one(request) for request in requests]

    def _check_listed(self) -> None:
        if self._list is not None:
            self._list.check_unchanged()

    def _explained(self, fault: EngineFault) -> EngineFault:
        """Return a fault with the log of a server that ended."""
        problem = self._processes.problem(DIAGNOSIS_S) if self._processes is not None else ""
        return EngineFault(f"{fault} {problem}".strip(), fault.completions)

    # ---- weights --------------------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        self._follow_list()
        validator = WeightSyncValidator(type(self).__name__, self._weights)
        fault, parts = self._send(validator.count(buckets), version)
        # no rank may generate before all weights are there
        if problem := from_rank_zero("" if fault is None else str(fault)):
            raise EngineFault(problem) from fault
        self._version = version
        return validator.report(version, parts)

    def _send(self, buckets: Iterator[Bucket], version: int) -> tuple[EngineFault | None, dict[str, float]]:
        """Send the buckets from the first rank, and take them on the others.

        Returns:
            The fault, if there was one, and the seconds of the parts, on the first rank.
        """
        fault, parts = None, dict[str, float]()
        if self._sender is not None:
            try:
                parts = self._sender.send(buckets, version)
            except EngineFault as problem:
                fault = self._explained(problem)
        drain(buckets)
        return fault, parts

    # ---- stats ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        assert self._client is not None
        metrics = self._client.spawn(self._drain()).result()
        if self._metrics is not None:
            return metrics
        return {name: metrics[name] for name in ("num_tokens", "tokens_per_s")}

    async def _drain(self) -> dict[str, float]:
        if self._metrics is not None:
            await self._metrics.sample()
        self._requests.count_seconds()
        if self._api is not None:
            self._stats.api_cpu = self._api.busiest_share(self._stats.seconds)
        return self._stats.drain()

    def advice(self) -> list[str]:
        return self._stats.advice()
