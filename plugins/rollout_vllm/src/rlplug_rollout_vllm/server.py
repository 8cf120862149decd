"""``VLLMServerRollout``: vLLM in processes of its own, which this plugin starts, or at URLs."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Final, TypeVar

import torch
import torch.distributed as dist

from rlplug.errors import ConfigError
from rlplug.interfaces import (
    Bucket,
    EngineCapabilities,
    EngineFault,
    Placement,
    PolicySpec,
    RolloutEngine,
    SyncReport,
)
from rlplug.rollout.receipt import WeightReceipt
from rlplug.types import Completion, Request, SamplingParams
from rlplug_rollout_vllm.http_client import HTTPClient
from rlplug_rollout_vllm.options import VLLMOptions
from rlplug_rollout_vllm.sampling import room_for, sampling_arguments
from rlplug_rollout_vllm.server_process import ServerProcesses, tell, wait_until_healthy
from rlplug_rollout_vllm.server_requests import Job, ServerRequests
from rlplug_rollout_vllm.server_settings import ServerSettings
from rlplug_rollout_vllm.server_stats import MetricsSampler
from rlplug_rollout_vllm.server_weights import WeightSender, is_loopback, transfer_backend
from rlplug_rollout_vllm.stats import EngineStats
from rlplug_rollout_vllm.versions import require_vllm
from rlplug_rollout_vllm.weights import policy_shapes

Shared = TypeVar("Shared")

STREAM_INTERVAL: Final = 8
"""Tokens that a server sends at once to a request that was submitted. An abort loses those that wait to be sent."""

DIAGNOSIS_S: Final = 3.0
"""How long a fault waits for what the server's end says of it."""


class VLLMServerRollout(RolloutEngine):
    """Generates with vLLM in server processes, on GPUs of their own.

    Without ``urls``, the first rank starts servers on its host, which end with the trainer. Requests go round-robin to
    all servers; weights reach all of them over one NCCL group (gloo on a CPU).

    Servers that run already are named by ``urls``; ``docs/rollout-engines.md`` says how to start them. Weights and keys
    travel unencrypted: keep to a network of your own.

    Args:
        gpus: For the servers, as indices among the GPUs that the trainer sees; each server gets
            ``tensor_parallel_size * data_parallel_size`` of them. Leave them out of ``trainer.devices``.
        urls: Of servers that run already, such as ``http://10.0.0.7:8000``; each is used for one trainer alone.
        api_key_env: Environment variable of the key of ``urls``. Servers that are started here get a random one.
        data_parallel_size: Copies of the model behind each server.
        start_deadline_s: For servers to become healthy.
        request_deadline_s: For one completion, from when it is asked for; a longer one counts as a fault.
        sync_deadline_s: For each bucket of weights; a longer one counts as a fault.
        options: Those of :class:`rlplug_rollout_vllm.options.VLLMOptions`; not with ``urls``.
    """

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities(
        colocated=False, disaggregated=True, streaming=True, tensor_parallel=True
    )

    def __init__(
        self,
        gpus: list[int] | None = None,
        urls: list[str] | None = None,
        api_key_env: str = "VLLM_API_KEY",
        data_parallel_size: int = 1,
        start_deadline_s: float = 600.0,
        request_deadline_s: float = 1800.0,
        sync_deadline_s: float = 300.0,
        **options: Any,
    ) -> None:
        self.options = VLLMOptions(**options)
        self.gpus = gpus
        self.urls = None if urls is None else [url.rstrip("/") for url in urls]
        self.api_key_env = api_key_env
        self.data_parallel_size = data_parallel_size
        self.start_deadline_s = start_deadline_s
        self.request_deadline_s = request_deadline_s
        self.sync_deadline_s = sync_deadline_s
        self._processes: ServerProcesses | None = None
        self._client: HTTPClient | None = None
        self._sender: WeightSender | None = None
        self._version = -1
        if self.urls is not None:
            self._check_urls(self.urls)

    def _check_urls(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ConfigError("rollout.urls is empty: name a server, or leave it out to have some started.")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"rollout.urls has {url!r}: write http://HOST:PORT.")
            if not is_loopback(url) and not os.environ.get(self.api_key_env):
                raise ConfigError(
                    f"rollout.urls has {url}, which others can reach, and the environment variable "
                    f"{self.api_key_env} (rollout.api_key_env) is not set: put the server's VLLM_API_KEY into it."
                )
        defaults = VLLMOptions()
        named = [f.name for f in fields(VLLMOptions) if getattr(self.options, f.name) != getattr(defaults, f.name)]
        named += [name for name in ("gpus",) if self.gpus is not None]
        if named:
            raise ConfigError(
                f"rollout.{named[0]} is set, and the servers at rollout.urls run already: set it where they are "
                "started, and remove it here."
            )

    # ---- start and close ------------------------------------------------------------------------------------------

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        require_vllm()
        self._policy, self._placement = policy, placement
        self._shapes = policy_shapes(policy.path)
        arguments = self.options.arguments(policy, placement.device)
        devices = self._devices_of_servers(placement.device)
        try:
            if self.urls is None and placement.rank == 0:
                self._start_servers(arguments, devices)
            self._connect()
        except BaseException:
            self.close()
            raise

    def _start_servers(self, arguments: dict[str, Any], devices: Sequence[str | None]) -> None:
        arguments["data_parallel_size"] = self.data_parallel_size
        arguments["weight_transfer_config"] = {"backend": transfer_backend(self._placement.device)}
        arguments.setdefault("stream_interval", STREAM_INTERVAL)
        self._processes = ServerProcesses(arguments, devices)
        tell(f"starting vLLM on {', '.join(self._processes.urls)}, log: {self._processes.logs()}")

    def _connect(self) -> None:
        urls, key, key_name = self._where()
        client = self._client = HTTPClient(key, key_name)
        wait_until_healthy(client, urls, self.start_deadline_s, self._processes)
        settings = [ServerSettings.read(client, url) for url in urls]
        self._max_model_len = min(self._policy.max_context, *(each.max_model_len for each in settings))
        self._stats = EngineStats(
            max_num_seqs=sum(each.max_num_seqs for each in settings),
            kv_cache_tokens=sum(each.kv_cache_tokens for each in settings),
        )
        rank = self._placement.rank
        self._requests = ServerRequests(client, urls, rank, self.request_deadline_s, self._stats)
        if rank == 0:
            self._sampler = MetricsSampler(client, urls, self._stats, lambda: self._requests.is_busy)
            client.spawn(self._sampler.run())
            self._sender = WeightSender(client, urls, self._placement.device, self.sync_deadline_s)
            self._sender.connect()

    def _devices_of_servers(self, device: torch.device) -> list[str | None]:
        """Return what each server that is started sees as ``CUDA_VISIBLE_DEVICES``."""
        if device.type != "cuda" or self.urls is not None:
            return [None]
        size = self.options.tensor_parallel_size * self.data_parallel_size
        gpus = self.gpus or []
        if not gpus or len(gpus) % size or len(set(gpus)) < len(gpus):
            raise ConfigError(
                f"rollout.gpus is {self.gpus}, and each server takes {size} (tensor_parallel_size times "
                "data_parallel_size): list GPUs for one or more servers, each GPU once, or set rollout.urls."
            )
        if max(gpus) >= torch.cuda.device_count():
            raise ConfigError(f"rollout.gpus is {gpus}, and the trainer sees {torch.cuda.device_count()} GPUs.")
        if device.index in gpus:
            warnings.warn(
                f"rollout.gpus has {device.index}, on which the trainer runs too: give it to one of both alone, or "
                "use VLLMRollout.",
                stacklevel=2,
            )
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = seen.split(",") if seen else [str(index) for index in range(torch.cuda.device_count())]
        return [",".join(names[gpu] for gpu in gpus[i : i + size]) for i in range(0, len(gpus), size)]

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
        rooms = [room_for(request, self._policy, self._max_model_len) for request in requests]
        return [
            Job(request, sampling_arguments(request, sampling, self._policy, room), self._version, is_streamed)
            for request, room in zip(requests, rooms, strict=True)
        ]

    def _explained(self, fault: EngineFault) -> EngineFault:
        """Return a fault with what the end of a server says of it."""
        problem = self._processes.problem(DIAGNOSIS_S) if self._processes is not None else ""
        return EngineFault(f"{fault} {problem}".strip(), fault.completions)

    # ---- weights --------------------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        receipt = WeightReceipt(type(self).__name__, self._shapes)
        fault = self._send(receipt.count(buckets))
        # no rank may generate before all weights are there
        if problem := from_rank_zero("" if fault is None else str(fault)):
            raise EngineFault(problem) from fault
        self._version = version
        return receipt.report(version)

    def _send(self, buckets: Iterator[Bucket]) -> EngineFault | None:
        """Send the buckets from the first rank, and take them on the others; return what went wrong."""
        fault = None
        if self._sender is not None:
            try:
                self._sender.send(buckets)
            except EngineFault as problem:
                fault = self._explained(problem)
        for _ in buckets:  # the others wait in those that are left
            pass
        return fault

    # ---- stats ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        assert self._client is not None
        metrics = self._client.spawn(self._drain()).result()
        if self._placement.rank == 0:
            return metrics
        return {name: metrics[name] for name in ("num_tokens", "tokens_per_s")}

    async def _drain(self) -> dict[str, float]:
        if self._placement.rank == 0:
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
