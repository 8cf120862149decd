"""``ServerEngine``: what is the same for every engine whose servers are started here, or run already at URLs."""

from __future__ import annotations

import os
import socket
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final, TypeVar

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from rlplug.errors import ConfigError
from rlplug.interfaces import Bucket, EngineFault, Placement, PolicySpec, RolloutEngine, SyncReport
from rlplug.rollout.engines.stats import EngineStats
from rlplug.rollout.servers.http_client import HTTPClient
from rlplug.rollout.servers.processes import Launch, ServerProcesses, ServerSlot, wait_until_healthy
from rlplug.rollout.servers.requests import Job, RequestAdapter, ServerRequests
from rlplug.rollout.servers.scheduler_metrics import SchedulerMetrics
from rlplug.rollout.servers.settings import (
    EngineLabels,
    ServerSettings,
    changed_options,
    check_urls,
    devices_of_servers,
)
from rlplug.rollout.servers.weight_sender import WeightSender
from rlplug.types import NO_VERSION, Completion, Request, SamplingParams
from rlplug.weight_sync.fp8_engine_checks import check_fp8_fits
from rlplug.weight_sync.manifest import policy_weights
from rlplug.weight_sync.receive_checks import WeightSyncValidator

Shared = TypeVar("Shared")

DIAGNOSIS_S: Final = 3.0
"""How long a fault waits for what the server's end says of it."""


class ServerEngine(RolloutEngine):
    """Generates in server processes, on GPUs of their own.

    Args:
        gpus: For the servers, as indices among the GPUs that the trainer sees.
        urls: Of servers that run already.
        api_key_env: Environment variable of the key of ``urls``.
        start_deadline_s: For servers to become healthy.
        request_deadline_s: For one completion, from when it is asked for.
        sync_deadline_s: For each bucket of weights.
        also_set: Options beside those in ``options`` that are not at their defaults, and that ``urls`` rules out.
    """

    words: ClassVar[EngineLabels]
    options: Any
    """How servers are built that are started here: a dataclass with ``tensor_parallel_size``; at its defaults with
    ``urls``."""

    def __init__(
        self,
        gpus: list[int] | None,
        urls: list[str] | None,
        api_key_env: str,
        start_deadline_s: float,
        request_deadline_s: float,
        sync_deadline_s: float,
        also_set: Collection[str] = (),
    ) -> None:
        self.gpus = gpus
        self.urls = None if urls is None else [url.rstrip("/") for url in urls]
        self.api_key_env = api_key_env
        self.start_deadline_s = start_deadline_s
        self.request_deadline_s = request_deadline_s
        self.sync_deadline_s = sync_deadline_s
        self._processes: ServerProcesses | None = None
        self._client: HTTPClient | None = None
        self._sender: WeightSender | None = None
        self._sampler: SchedulerMetrics | None = None
        self._version = NO_VERSION
        if self.urls is not None:
            named = changed_options(self.options) | {*also_set} | ({"gpus"} if gpus is not None else set())
            check_urls(self.urls, api_key_env, self.words, named)

    # ---- the engine's own -----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def gpus_per_server(self) -> int:
        """How many GPUs a server that is started here takes."""

    @abstractmethod
    def prepare(self, policy: PolicySpec, placement: Placement) -> None:
        """Check what can be checked before anything starts.

        Raises:
            ConfigError: Something is missing, or contradicts.
        """

    @abstractmethod
    def launch(self, place: ServerSlot) -> Launch:
        """Return how a server is started."""

    @abstractmethod
    def read_settings(self, client: HTTPClient, url: str) -> ServerSettings:
        """Ask a server what it is.

        Raises:
            ConfigError: It is of another version, or was not started as training needs it.
            RunError: It refuses the key.
        """

    @abstractmethod
    def dialect(self) -> RequestAdapter:
        """Return how servers are asked for completions."""

    @abstractmethod
    def make_sampler(self, client: HTTPClient, urls: Sequence[str], stats: EngineStats) -> SchedulerMetrics:
        """Return what observes the servers' schedulers."""

    @abstractmethod
    def make_sender(self, client: HTTPClient, urls: Sequence[str]) -> WeightSender:
        """Return what sends weights."""

    @abstractmethod
    def sampling_arguments(self, request: Request, sampling: SamplingParams) -> dict[str, Any]:
        """Return the engine's own arguments for one request.

        Raises:
            RunError: Its prompt leaves no room for a completion.
        """

    def check(self, policy: PolicySpec) -> None:
        check_fp8_fits(type(self).__name__, policy, self.options.tensor_parallel_size)

    # ---- start and close ------------------------------------------------------------------------------------------

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        self._policy, self._placement = policy, placement
        self.prepare(policy, placement)
        self._weights = policy_weights(policy)
        on_gpus = placement.device.type == "cuda" and self.urls is None
        devices = devices_of_servers(self.gpus, self.gpus_per_server, placement, self.words) if on_gpus else [None]
        try:
            if self.urls is None and placement.rank == 0:
                self._processes = ServerProcesses(self.words.engine, self.launch, devices, self.words.noise)
                where = ", ".join(self._processes.urls)
                rank_zero_info(f"starting {self.words.engine} on {where}, log: {self._processes.logs()}")
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        urls, key, key_name = self._where()
        client = self._client = HTTPClient(key, key_name, self.words.server_key)
        wait_until_healthy(self.words.engine, client, urls, self.start_deadline_s, self._processes)
        settings = [self.read_settings(client, url) for url in urls]
        self._max_model_len = min(self._policy.max_context, *(each.max_model_len for each in settings))
        self._stats = EngineStats(
            max_num_seqs=sum(each.max_num_seqs for each in settings),
            kv_cache_tokens=sum(each.kv_cache_tokens for each in settings),
            max_num_seqs_key=self.words.max_num_seqs_key,
            memory_key=self.words.memory_key,
        )
        rank = self._placement.rank
        self._requests = ServerRequests(client, urls, rank, self.request_deadline_s, self._stats, self.dialect())
        if rank == 0:
            self._sampler = self.make_sampler(client, urls, self._stats)
            client.spawn(self._sampler.run())
            self._sender = self.make_sender(client, urls)
            self._sender.connect()

    def _where(self) -> tuple[list[str], str, str]:
        """Return the servers' URLs, their key, and where that comes from; the same on all ranks."""
        if self.urls is not None:
            return self.urls, os.environ.get(self.api_key_env, ""), f"{self.api_key_env} (rollout.api_key_env)"
        mine = None if self._processes is None else (self._processes.urls, self._processes.key, socket.gethostname())
        urls, key, host = from_rank_zero(mine)
        if host != socket.gethostname():
            raise ConfigError(
                f"the servers run on {host} for ranks of that host alone, and rank {self._placement.rank} is on "
                f"{socket.gethostname()}: start servers yourself, and set rollout.urls."
            )
        return urls, key, "the servers' environment"

    def close(self) -> None:
        client, self._client = self._client, None
        sender, self._sender = self._sender, None
        processes, self._processes = self._processes, None
        self._sampler = None
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
        jobs = self._jobs(requests, sampling, is_streamed=False)
        try:
            return self._requests.generate(jobs)
        except EngineFault as fault:
            raise self._explained(fault) from fault

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self._requests.submit(self._jobs(requests, sampling, is_streamed=True))

    def collect(self, timeout_s: float) -> list[Completion]:
        try:
            return self._requests.collect(timeout_s)
        except EngineFault as fault:
            raise self._explained(fault) from fault

    def abort(self, request_ids: Sequence[str]) -> None:
        self._requests.abort(request_ids)

    def _jobs(self, requests: Sequence[Request], sampling: SamplingParams, is_streamed: bool) -> list[Job]:
        return [
            Job(request, sampling, self.sampling_arguments(request, sampling), self._version, is_streamed)
            for request in requests
        ]

    def _explained(self, fault: EngineFault) -> EngineFault:
        """Return a fault with what the end of a server says of it."""
        problem = self._processes.problem(DIAGNOSIS_S) if self._processes is not None else ""
        return EngineFault(f"{fault} {problem}".strip(), fault.completions)

    # ---- weights --------------------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        receipt = WeightSyncValidator(type(self).__name__, self._weights)
        fault = self._send(receipt.count(buckets), version)
        # no rank may generate before all weights are there
        if problem := from_rank_zero("" if fault is None else str(fault)):
            raise EngineFault(problem) from fault
        self._version = version
        return receipt.report(version)

    def _send(self, buckets: Iterator[Bucket], version: int) -> EngineFault | None:
        """Send the buckets from the first rank, and take them on the others; return what went wrong."""
        fault = None
        if self._sender is not None:
            try:
                self._sender.send(buckets, version)
            except EngineFault as problem:
                fault = self._explained(problem)
        for _ in buckets:  # the others wait in those that are left
            pass
        return fault

    # ---- stats ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        assert self._client is not None
        metrics = self._client.spawn(self._drain()).result()
        if self._sampler is not None:
            return metrics
        return {name: metrics[name] for name in ("num_tokens", "tokens_per_s")}

    async def _drain(self) -> dict[str, float]:
        if self._sampler is not None:
            await self._sampler.sample()
        self._requests.count_seconds()
        return self._stats.drain()

    def advice(self) -> list[str]:
        return self._stats.advice()


def from_rank_zero(value: Shared | None) -> Any:
    """Return what the trainer's first rank gives here."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
