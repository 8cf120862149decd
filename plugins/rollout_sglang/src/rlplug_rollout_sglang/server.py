"""``SGLangServerRollout``: SGLang in server processes, which it starts, or which run already at URLs."""

from __future__ import annotations

import json
import os
import sys
import uuid
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from packaging.version import Version
from rlplug_engines.servers import (
    LOOPBACK,
    BackendContext,
    EngineLabels,
    Group,
    Launch,
    PendingRequest,
    Rendezvous,
    SchedulerState,
    SendGroup,
    Server,
    ServerBackend,
    ServerEngine,
    ServerSettings,
    ServerSlot,
    TensorList,
    check_server_fp8,
)

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import EngineCapabilities, EngineFault, EngineMemory, EngineMemoryRequest, PolicySpec
from rlplug.token_arrays import as_tokens
from rlplug.types import Completion
from rlplug_rollout_sglang.fp8 import check_fp8
from rlplug_rollout_sglang.host import largest_graph
from rlplug_rollout_sglang.memory_plan import planned_memory
from rlplug_rollout_sglang.options import CACHE_VARIABLES, CONTEXT_MARGIN, ENVIRONMENT, SAMPLING_BACKEND, SGLangOptions
from rlplug_rollout_sglang.sampler import FLAG
from rlplug_rollout_sglang.sampling import SAMPLING_EXTRA, Output, sampling_arguments, to_completion
from rlplug_rollout_sglang.versions import VERSIONS, require_sglang

NEEDED: Final = {
    "skip_tokenizer_init": (True, "with --skip-tokenizer-init: token ids go in and out"),
    "incremental_streaming_output": (True, "with --incremental-streaming-output"),
    "sampling_backend": (
        SAMPLING_BACKEND,
        f"with --sampling-backend {SAMPLING_BACKEND} and {FLAG}=1 in its environment, where this plugin is installed: "
        "SGLang's own give other logprobs than those of what they draw from",
    ),
    "dp_size": (1, "without --dp-size, once for each copy of the model: SGLang takes weights for one"),
    "pp_size": (1, "without --pp-size"),
    "speculative_algorithm": (None, "without --speculative-algorithm"),
}
"""Arguments that a server must have been started with, and how that is done."""
KEPT_OF_PROMPT: Final = 6
"""The longest prompt that SGLang takes is so much shorter than its context."""
STREAM_INTERVAL: Final = 8
"""Tokens that a server sends at once to a request that was submitted. An abort loses those that wait to be sent."""
FLUSH_S: Final = 10.0
"""Time for aborted requests to be gone."""


class SGLangBackend(ServerBackend):
    """SGLang's own routes: weights come with the trainer's version, which completions then carry."""

    labels = EngineLabels(
        engine="SGLang",
        colocated="SGLangRollout",
        server_key="--api-key",
        context_key="context_length",
    )
    metrics_route = "v1/loads?include=core"

    def __init__(self, options: SGLangOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._group_name = f"rlplug-{uuid.uuid4().hex}"  # a name can be used once in the life of a server
        self._arguments: dict[str, Any] = {}
        if context.is_launched:
            require_sglang()
            if self.device.type != "cuda":
                raise ConfigError(
                    "model.rollout is SGLangServerRollout, and the trainer has no GPU: SGLang starts on GPUs alone. "
                    "Use VLLMServerRollout or HFRollout, or set rollout.urls."
                )
            self._arguments = {"stream_interval": STREAM_INTERVAL} | options.arguments(self.policy)

    def launch(self, slot: ServerSlot) -> Launch:
        # without incremental_streaming_output each event has all tokens so far
        here = {"host": LOOPBACK, "port": slot.port, "api_key": slot.key, "incremental_streaming_output": True}
        file = slot.folder / f"arguments-{slot.port}.json"  # it has the key; all users read command lines
        file.write_text(json.dumps(self._arguments | here))
        # where NCCL_CUMEM_ENABLE is not set, SGLang turns it off, and both ends of the group must agree: NCCL's default
        environment = ENVIRONMENT | {"NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "-2")}
        return Launch([sys.executable, "-m", "rlplug_rollout_sglang.server_main", str(file)], environment)

    async def settings(self, server: Server) -> ServerSettings:
        info: dict[str, Any] = await server.get("server_info")
        version = VERSIONS.require(Version(info["version"]), f"at {server.url}")
        for name, (needed, remedy) in NEEDED.items():
            if info[name] != needed:
                raise ConfigError(f"SGLang {version} at {server.url} has {name}={info[name]!r}: start it {remedy}.")
        found = json.loads(info["json_model_override_args"]).get("quantization_config")
        check_server_fp8("SGLang", server.url, found, self.policy.fp8, "--json-model-override-args")
        return ServerSettings(
            max_model_len=info["max_req_input_len"] + KEPT_OF_PROMPT - CONTEXT_MARGIN,
            max_num_seqs=info["internal_states"][0]["effective_max_running_requests_per_dp"],
            kv_cache_tokens=info["max_total_num_tokens"],
            num_workers=info["tp_size"],
            max_num_batched_tokens=max(info["chunked_prefill_size"] or 0, 0),
            largest_graph=largest_graph(info),
        )

    def payload(self, pending: PendingRequest) -> dict[str, Any]:
        return {
            "rid": pending.name,
            "input_ids": pending.request.prompt_ids,
            "sampling_params": sampling_arguments(pending.request, pending.sampling, self.policy, pending.max_tokens),
            "return_logprob": True,
            "stream": pending.is_streamed,
        }

    def receive(self, pending: PendingRequest, answer: dict[str, Any]) -> None:
        about, token_ids = pending.field(answer, "meta_info", dict), pending.field(answer, "output_ids", list)
        reason = pending.field(about, "finish_reason", dict, None)
        scored = pending.field(about, "output_token_logprobs", list)
        if reason is not None and pending.field(reason, "type", str) == "abort":
            raise EngineFault(f"{pending.url} gave a request up: {str(reason.get('message'))[:1000]}")
        if any(not isinstance(entry, list) or len(entry) < 2 for entry in scored):
            raise EngineFault(f"{pending.url} sent 'meta_info.output_token_logprobs' that are no pairs.")
        if [entry[1] for entry in scored] != token_ids:
            raise EngineFault(
                f"{pending.url} returned {len(scored)} logprobs of other tokens than its {len(token_ids)}."
            )
        pending.append(token_ids, [entry[0] for entry in scored])
        pending.finish_reason = None if reason is None else reason["type"]
        pending.weight_version = str(pending.field(about, "weight_version", str, int))
        pending.cached_prompt_tokens = pending.field(about, "cached_tokens", int)
        pending.preemptions = pending.field(about, "num_retractions", int)

    def completion(self, pending: PendingRequest) -> Completion:
        output = Output(
            token_ids=as_tokens(pending.token_ids, np.int32),
            logprobs=as_tokens(pending.logprobs, np.float32),
            finish_reason=str(pending.finish_reason),
            # a request that was aborted before its first token has none
            weight_version=str(pending.version) if pending.weight_version is None else pending.weight_version,
            prompt_tokens=len(pending.request.prompt_ids),
            cached_tokens=pending.cached_prompt_tokens or 0,
            retractions=pending.preemptions,
        )
        return to_completion(pending.request, pending.sampling, output, self.policy.eos_token_ids, pending.version)

    async def abort(self, server: Server, pending: PendingRequest) -> None:
        # without this, it would notice the closed connection two seconds later
        await server.post("abort_request", {"rid": pending.name})

    def metrics(self, answer: Any) -> SchedulerState:
        loads = answer["loads"]  # prefix cache and preemptions come with each completion
        return SchedulerState(
            running=sum(load["num_running_reqs"] for load in loads),
            waiting=sum(load["num_waiting_reqs"] for load in loads),
            kv_cache_use=max(load["token_usage"] for load in loads),
        )

    async def join(self, server: Server, rendezvous: Rendezvous) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        payload = rendezvous.payload() | {"group_name": self._group_name, "backend": backend}
        await server.post("init_weights_update_group", payload)

    def make_group(self, rendezvous: Rendezvous, timeout_s: float) -> Group:
        # SGLang's init_custom_process_group gives torch's _new_process_group_helper a store with the group's name as
        # prefix; torch adds the name once more, and then the kind of device
        prefixes = [self._group_name, f"{self._group_name}/", f"{self.device.type}/"]
        return SendGroup.over_tcp(rendezvous, self.device, timeout_s, prefixes)

    async def begin(self, server: Server) -> None:
        if not await server.takes_post("begin_weight_update"):  # newer versions take weights between two calls
            return
        try:
            await server.post("begin_weight_update", {})
        except EngineFault:
            raise
        except RunError:  # the trainer before may have ended in the middle of a sync
            await server.post("end_weight_update", {})
            await server.post("begin_weight_update", {})

    async def receive_weights(self, server: Server, tensors: TensorList, version: int) -> None:
        how = {"group_name": self._group_name, "flush_cache": False, "weight_version": str(version)}
        await server.post("update_weights_from_distributed", asdict(tensors) | how)

    async def finish(self, server: Server) -> None:
        try:
            if await server.takes_post("end_weight_update"):
                await server.post("end_weight_update", {})
            await server.post(f"flush_cache?timeout={FLUSH_S:g}", {})
        except EngineFault:
            raise
        except RunError as refusal:
            raise EngineFault(
                f"{server.url} could not take its new weights, or empty its prefix cache of the old ones: do requests "
                f"of somebody else run there? {refusal}"
            ) from refusal

    async def leave(self, server: Server) -> None:
        await server.post("destroy_weights_update_group", {"group_name": self._group_name})


class SGLangServerRollout(ServerEngine):
    """Generates with SGLang in server processes, on GPUs of their own.

    Without ``urls``, the first rank starts servers on its host, which end with the trainer. With them, SGLang need not
    be installed beside the trainer; ``docs/rollout-engines.md`` says how to start such servers, and what they trust.

    Args:
        gpus: GPUs for the servers, as indices among the GPUs that the trainer sees; each server gets
            ``tensor_parallel_size`` of them. Leave them out of ``trainer.devices``.
        urls: Addresses of running servers, such as ``http://10.0.0.7:30000``; each is used for one trainer alone.
        api_key_env: Environment variable of the key of ``urls``. Servers that are started here get a random one.
        start_deadline_s: Longest time for servers to become healthy, in seconds.
        request_deadline_s: Longest time in which a server answers no request, in seconds; more counts as a fault.
        sync_deadline_s: Longest time for each bucket of weights, in seconds; a longer one counts as a fault.
        options: Those of :class:`rlplug_rollout_sglang.options.SGLangOptions`; not with ``urls``.
    """

    capabilities: EngineCapabilities = EngineCapabilities(
        colocated=False, disaggregated=True, streaming=True, fp8_refit=True, tensor_parallel=True
    )
    compile_cache_variables = CACHE_VARIABLES
    sampling_extra = SAMPLING_EXTRA
    backend_class = SGLangBackend

    def __init__(
        self,
        gpus: list[int] | None = None,
        urls: list[str] | None = None,
        api_key_env: str = "SGLANG_API_KEY",
        start_deadline_s: float = 600.0,
        request_deadline_s: float = 1800.0,
        sync_deadline_s: float = 300.0,
        **options: Any,
    ) -> None:
        super().__init__(
            SGLangOptions(**options), gpus, urls, api_key_env, start_deadline_s, request_deadline_s, sync_deadline_s
        )

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory | None:
        return planned_memory(self.options, policy, needs, len(self.gpus)) if self.gpus else None

    def check(self, policy: PolicySpec) -> None:
        check_fp8(type(self).__name__, policy, self.options.tensor_parallel_size)
