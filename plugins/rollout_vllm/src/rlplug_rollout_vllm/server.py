"""``VLLMServerRollout``: vLLM in processes of its own, which this plugin starts, or at URLs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import torch

from rlplug.interfaces import EngineCapabilities, Placement, PolicySpec
from rlplug.rollout.engines import EngineStats, max_completion_tokens
from rlplug.rollout.servers.http_client import HTTPClient
from rlplug.rollout.servers.processes import Launch, ServerSlot
from rlplug.rollout.servers.requests import RequestAdapter
from rlplug.rollout.servers.scheduler_metrics import SchedulerMetrics
from rlplug.rollout.servers.server_engine import ServerEngine
from rlplug.rollout.servers.settings import EngineLabels, ServerSettings
from rlplug.rollout.servers.weight_sender import WeightSender
from rlplug.types import Request, SamplingParams
from rlplug_rollout_vllm.options import VLLMOptions
from rlplug_rollout_vllm.sampling import sampling_arguments
from rlplug_rollout_vllm.server_command import KEY, NOISE, launch
from rlplug_rollout_vllm.server_dialect import VLLMDialect
from rlplug_rollout_vllm.server_settings import read_settings
from rlplug_rollout_vllm.server_stats import MetricsSampler
from rlplug_rollout_vllm.server_weights import VLLMWeightSender, transfer_backend
from rlplug_rollout_vllm.versions import require_vllm

STREAM_INTERVAL: Final = 8
"""Tokens that a server sends at once to a request that was submitted. An abort loses those that wait to be sent."""


class VLLMServerRollout(ServerEngine):
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

    capabilities: EngineCapabilities = EngineCapabilities(
        colocated=False,
        disaggregated=True,
        streaming=True,
        fp8_refit=torch.cuda.is_available(),
        tensor_parallel=True,
    )
    options: VLLMOptions
    words: ClassVar[EngineLabels] = EngineLabels(
        engine="vLLM",
        colocated="VLLMRollout",
        server_key=KEY,
        gpus_per_server="tensor_parallel_size times data_parallel_size",
        noise=NOISE,
    )

    def __init__(
        self,
        gpus: list[int] | None = None,
        urls: list[str] | None = None,
        api_key_env: str = KEY,
        data_parallel_size: int = 1,
        start_deadline_s: float = 600.0,
        request_deadline_s: float = 1800.0,
        sync_deadline_s: float = 300.0,
        **options: Any,
    ) -> None:
        self.options = VLLMOptions(**options)
        self.data_parallel_size = data_parallel_size
        also_set = {"data_parallel_size"} if data_parallel_size != 1 else set()
        super().__init__(gpus, urls, api_key_env, start_deadline_s, request_deadline_s, sync_deadline_s, also_set)

    @property
    def gpus_per_server(self) -> int:
        return self.options.tensor_parallel_size * self.data_parallel_size

    def prepare(self, policy: PolicySpec, placement: Placement) -> None:
        require_vllm()
        self._arguments = self.options.arguments(policy, placement.device) | {
            "data_parallel_size": self.data_parallel_size,
            "weight_transfer_config": {"backend": transfer_backend(placement.device)},
        }
        self._arguments.setdefault("stream_interval", STREAM_INTERVAL)

    def launch(self, place: ServerSlot) -> Launch:
        return launch(self._arguments, place)

    def read_settings(self, client: HTTPClient, url: str) -> ServerSettings:
        return read_settings(client, url, self._policy.fp8)

    def dialect(self) -> RequestAdapter:
        return VLLMDialect()

    def make_sampler(self, client: HTTPClient, urls: Sequence[str], stats: EngineStats) -> SchedulerMetrics:
        return MetricsSampler(client, urls, stats, lambda: self._requests.is_busy)

    def make_sender(self, client: HTTPClient, urls: Sequence[str]) -> WeightSender:
        return VLLMWeightSender(client, urls, self._placement.device, self.sync_deadline_s)

    def sampling_arguments(self, request: Request, sampling: SamplingParams) -> dict[str, Any]:
        room = max_completion_tokens(request, self._policy, self._max_model_len, "max_model_len")
        return sampling_arguments(request, sampling, self._policy, room)
