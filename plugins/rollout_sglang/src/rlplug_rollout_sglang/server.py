"""``SGLangServerRollout``: SGLang in processes of its own, which this plugin starts, or at URLs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from rlplug.errors import ConfigError
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
from rlplug_rollout_sglang.fp8 import check_fp8
from rlplug_rollout_sglang.options import SGLangOptions
from rlplug_rollout_sglang.sampling import sampling_arguments
from rlplug_rollout_sglang.server_command import launch
from rlplug_rollout_sglang.server_dialect import SGLangDialect
from rlplug_rollout_sglang.server_settings import read_settings
from rlplug_rollout_sglang.server_stats import LoadSampler
from rlplug_rollout_sglang.server_weights import SGLangWeightSender
from rlplug_rollout_sglang.versions import require_sglang

KEY_VARIABLE: Final = "SGLANG_API_KEY"


class SGLangServerRollout(ServerEngine):
    """Generates with SGLang in server processes, on GPUs of their own.

    Without ``urls``, the first rank starts servers on its host, which end with the trainer. Requests go round-robin to
    all servers; weights reach all of them over one NCCL group.

    Servers that run already are named by ``urls``; ``docs/rollout-engines.md`` says how to start them. SGLang need not
    be installed beside the trainer then. Weights and keys travel unencrypted: keep to a network of your own.

    Args:
        gpus: For the servers, as indices among the GPUs that the trainer sees; each server gets
            ``tensor_parallel_size`` of them. Leave them out of ``trainer.devices``.
        urls: Of servers that run already, such as ``http://10.0.0.7:30000``; each is used for one trainer alone.
        api_key_env: Environment variable of the key of ``urls``. Servers that are started here get a random one.
        start_deadline_s: For servers to become healthy.
        request_deadline_s: For one completion, from when it is asked for; a longer one counts as a fault.
        sync_deadline_s: For each bucket of weights; a longer one counts as a fault.
        options: Those of :class:`rlplug_rollout_sglang.options.SGLangOptions`; not with ``urls``.
    """

    capabilities: EngineCapabilities = EngineCapabilities(
        colocated=False, disaggregated=True, streaming=True, fp8_refit=True, tensor_parallel=True
    )
    options: SGLangOptions
    words: ClassVar[EngineLabels] = EngineLabels(
        engine="SGLang",
        colocated="SGLangRollout",
        server_key="--api-key",
        gpus_per_server="tensor_parallel_size",
        max_num_seqs_key="rollout.max_running_requests",
        memory_key="rollout.mem_fraction_static",
    )

    def __init__(
        self,
        gpus: list[int] | None = None,
        urls: list[str] | None = None,
        api_key_env: str = KEY_VARIABLE,
        start_deadline_s: float = 600.0,
        request_deadline_s: float = 1800.0,
        sync_deadline_s: float = 300.0,
        **options: Any,
    ) -> None:
        self.options = SGLangOptions(**options)
        super().__init__(gpus, urls, api_key_env, start_deadline_s, request_deadline_s, sync_deadline_s)

    @property
    def gpus_per_server(self) -> int:
        return self.options.tensor_parallel_size

    def check(self, policy: PolicySpec) -> None:
        check_fp8(type(self).__name__, policy, self.gpus_per_server)

    def prepare(self, policy: PolicySpec, placement: Placement) -> None:
        if self.urls is not None:
            return
        require_sglang()
        if placement.device.type != "cuda":
            raise ConfigError(
                "model.rollout is SGLangServerRollout, and the trainer has no GPU: SGLang starts on GPUs alone. Use "
                "VLLMServerRollout or HFRollout, or set rollout.urls."
            )
        self._arguments = self.options.arguments(policy)

    def launch(self, place: ServerSlot) -> Launch:
        return launch(self._arguments, place)

    def read_settings(self, client: HTTPClient, url: str) -> ServerSettings:
        return read_settings(client, url, self._policy.fp8)

    def dialect(self) -> RequestAdapter:
        return SGLangDialect()

    def make_sampler(self, client: HTTPClient, urls: Sequence[str], stats: EngineStats) -> SchedulerMetrics:
        return LoadSampler(client, urls, stats, lambda: self._requests.is_busy)

    def make_sender(self, client: HTTPClient, urls: Sequence[str]) -> WeightSender:
        return SGLangWeightSender(client, urls, self._placement.device, self.sync_deadline_s)

    def sampling_arguments(self, request: Request, sampling: SamplingParams) -> dict[str, Any]:
        room = max_completion_tokens(request, self._policy, self._max_model_len, "context_length")
        return sampling_arguments(request, sampling, self._policy, room)
