"""``VLLMServerRollout``: vLLM in server processes, which it starts, or which run already at URLs.

The trainer's process does not import vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any, Final

import torch
from packaging.version import Version
from rlplug_engines.colocated import declared_fields, package_folder
from rlplug_engines.servers import (
    LOOPBACK,
    BackendContext,
    EngineLabels,
    Launch,
    PendingRequest,
    SchedulerState,
    Server,
    ServerBackend,
    ServerEngine,
    ServerError,
    ServerSettings,
    ServerSlot,
    TensorList,
    check_server_fp8,
    to_flags,
)
from rlplug_engines.servers.process_group import Rendezvous

from rlplug.errors import ConfigError
from rlplug.interfaces import EngineCapabilities, EngineFault, EngineMemory, EngineMemoryRequest, PolicySpec
from rlplug.weight_sync.hf_names import DECAYS
from rlplug.weight_sync.manifest import policy_weights
from rlplug_rollout_vllm.engine_requests import SAMPLING_EXTRA, sampling_arguments
from rlplug_rollout_vllm.memory_plan import planned_memory
from rlplug_rollout_vllm.options import CACHE_VARIABLES, VERSIONS, VLLMServerOptions, scale_variables, vllm_version
from rlplug_rollout_vllm.weight_transfer import OVER_GLOO, OVER_NCCL

KEY: Final = "VLLM_API_KEY"
LOGPROBS_MODE: Final = "processed_logprobs"
NEEDED_ROUTES: Final = {
    "start_weight_update": "with VLLM_SERVER_DEV_MODE=1 in its environment",
    "inference/v1/generate": "with --enable-scale-out",
}
"""Routes that a server has not by default, and how it gets them."""
STREAM_INTERVAL: Final = 8
"""Tokens that a server sends at once to a request that was submitted. An abort loses those that wait to be sent."""
FINAL_ONLY: Final = 2
"""vLLM's ``RequestOutputKind``: without it, 0.26 puts the whole completion together anew for every token. Requests
whose tokens are streamed get others."""
COUNTERS: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "cached_prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
}
"""Metrics that are added up over the copies of the model, and the fields of ``SchedulerState`` that they are."""
RESET_TRIES: Final = 50
RESET_AGAIN_S: Final = 0.1


class VLLMBackend(ServerBackend):
    """vLLM's OpenAI server, with the routes for weights that ``VLLM_SERVER_DEV_MODE`` opens."""

    labels = EngineLabels(
        engine="vLLM",
        colocated="VLLMRollout",
        server_key=KEY,
        gpus_per_server="tensor_parallel_size times data_parallel_size",
        noise=("nanobind:", " - leaked", " - ... skipped", "See https://nanobind"),
        api_processes=("APIServer", "rlplug_rollout_vllm.serve"),
    )
    generate_route = "inference/v1/generate"

    def __init__(self, options: VLLMServerOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        vllm_version()  # refuse one that is missing or unknown
        self._transfer = {"backend": OVER_NCCL if self.device.type == "cuda" else OVER_GLOO}
        self._arguments = {"stream_interval": STREAM_INTERVAL} | options.arguments(self.policy, self.device)
        self._arguments["data_parallel_size"] = context.data_parallel_size
        self._arguments["weight_transfer_config"] = self._transfer

    def launch(self, slot: ServerSlot) -> Launch:
        arguments = {name: value for name, value in self._arguments.items() if name != "model"}
        arguments["api_server_count"] = self.options.api_processes(self.device)
        command = [sys.executable, "-m", "rlplug_rollout_vllm.serve", self._arguments["model"], *to_flags(arguments)]
        command += ["--host", LOOPBACK, "--port", str(slot.port), *frontend_flags()]
        environment = {
            KEY: slot.key,
            "VLLM_SERVER_DEV_MODE": "1",  # the routes for weights
            "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),  # the trainer's too
            "VLLM_ENABLE_V1_MULTIPROCESSING": None,  # of an engine in the trainer's process
        }
        scales = scale_variables(self.policy, self.device)
        environment |= {name: os.environ.get(name, value) for name, value in scales.items()}
        return Launch(command, environment)

    async def settings(self, server: Server) -> ServerSettings:
        version = VERSIONS.require(Version((await server.get("version"))["version"]), f"at {server.url}")
        await server.get("v1/models")  # asks for the key
        for route, remedy in NEEDED_ROUTES.items():
            if not await server.takes_post(route):
                raise ConfigError(f"vLLM {version} at {server.url} has no /{route}: start it {remedy}.")
        config: dict[str, Any] = (await server.get("server_info?config_format=json"))["vllm_config"]
        model, cache = config["model_config"], config["cache_config"]
        if (mode := model["logprobs_mode"]) != LOGPROBS_MODE:
            raise ConfigError(
                f"vLLM at {server.url} has the logprobs mode {mode!r}, with which ratios of probabilities are wrong: "
                f"start it with --logprobs-mode {LOGPROBS_MODE}."
            )
        if self.policy.stop and model["skip_tokenizer_init"]:
            raise ConfigError(
                f"vLLM at {server.url} has no tokenizer, and model.sampling.stop is set: start it without "
                "--skip-tokenizer-init."
            )
        if (config.get("weight_transfer_config") or {}).get("backend") != self._transfer["backend"]:
            raise ConfigError(
                f"vLLM at {server.url} does not take weights as this trainer sends them: install rlplug-rollout-vllm "
                f"there, and start it with --weight-transfer-config '{json.dumps(self._transfer)}'."
            )
        states, wanted = cache["mamba_ssm_cache_dtype"], self._arguments["mamba_ssm_cache_dtype"]
        if wanted not in ("auto", states) and keeps_states(self.policy):
            raise ConfigError(
                f"vLLM at {server.url} keeps recurrent states in {states!r}, which rounds them at each token: start it "
                f"with --mamba-ssm-cache-dtype {wanted}."
            )
        found = (model.get("hf_overrides") or {}).get("quantization_config")
        check_server_fp8("vLLM", server.url, found, self.policy.fp8, "--hf-overrides")
        copies = config["parallel_config"]["data_parallel_size"]
        return ServerSettings(
            max_model_len=model["max_model_len"],
            max_num_seqs=config["scheduler_config"]["max_num_seqs"] * copies,
            kv_cache_tokens=(cache["num_gpu_blocks"] or 0) * (cache["block_size"] or 0) * copies,
            num_workers=int((await server.get("get_world_size"))["world_size"]),
            copies=copies,
            max_num_batched_tokens=config["scheduler_config"]["max_num_batched_tokens"],
            largest_graph=config["compilation_config"]["max_cudagraph_capture_size"] or 0,
        )

    def payload(self, pending: PendingRequest) -> dict[str, Any]:
        arguments = sampling_arguments(pending.request, pending.sampling, self.policy, pending.max_tokens)
        return {
            "token_ids": pending.request.prompt_ids,
            "sampling_params": {**arguments, "output_kind": FINAL_ONLY},
            "stream": pending.is_streamed,
        }

    def receive(self, pending: PendingRequest, answer: dict[str, Any]) -> None:
        for choice in pending.field(answer, "choices", list):
            scored = pending.field(choice, "logprobs", dict, None) or {"content": None}
            content = pending.field(scored, "content", list, None) or []
            logprobs = [entry["logprob"] for entry in content]
            pending.append(pending.field(choice, "token_ids", list, None) or [], logprobs)
            pending.finish_reason = pending.field(choice, "finish_reason", str, None)

    def metrics(self, answer: Any) -> SchedulerState:
        from prometheus_client.parser import text_string_to_metric_families

        counts, kv_cache_use = dict.fromkeys(COUNTERS.values(), 0), 0.0
        for sample in (sample for family in text_string_to_metric_families(answer) for sample in family.samples):
            if sample.name in COUNTERS:
                counts[COUNTERS[sample.name]] += int(sample.value)
            elif sample.name == "vllm:kv_cache_usage_perc":
                kv_cache_use = max(kv_cache_use, sample.value)
        return SchedulerState(**counts, kv_cache_use=kv_cache_use)

    async def join(self, server: Server, rendezvous: Rendezvous) -> None:
        await server.post("init_weight_transfer_engine", {"init_info": rendezvous.payload()})

    def join_remedy(self) -> str:
        return "A server of rollout.urls that another trainer used before may have to start anew."

    async def begin(self, server: Server) -> None:
        # vLLM hears late that a connection was closed, and a request that runs on while weights are replaced kills it
        await server.post("pause?mode=abort")
        try:
            await server.post("start_weight_update")
        except ServerError:  # the trainer before may have ended in the middle of a sync
            with contextlib.suppress(ServerError):
                await server.post("finish_weight_update")
            await server.post("start_weight_update")

    async def receive_weights(self, server: Server, tensors: TensorList, version: int) -> None:
        update_info = {"names": tensors.names, "dtype_names": tensors.dtypes, "shapes": tensors.shapes}
        await server.post("update_weights", {"update_info": update_info})

    async def finish(self, server: Server) -> None:
        await server.post("finish_weight_update")
        for _ in range(RESET_TRIES):  # the blocks of aborted requests are held until the scheduler's next step
            if (await server.post("reset_prefix_cache"))["success"]:
                await server.post("resume")
                return
            await asyncio.sleep(RESET_AGAIN_S)
        raise EngineFault(f"{server.url} could not reset its prefix cache: do requests of somebody else run there?")


class VLLMServerRollout(ServerEngine):
    """Generates with vLLM in server processes, on GPUs of their own, as ``docs/rollout-engines.md`` says.

    Weights and keys travel unencrypted: keep to a network of your own.

    Args:
        gpus: GPUs for the servers, as indices among the GPUs that the trainer sees; each server gets
            ``tensor_parallel_size * data_parallel_size`` of them. Leave them out of ``trainer.devices``.
        urls: Addresses of running servers, such as ``http://10.0.0.7:8000``; each is used for one trainer alone.
        api_key_env: Environment variable of the key of ``urls``. Servers that are started here get a random one.
        data_parallel_size: Copies of the model behind each server.
        start_deadline_s: Longest time for servers to become healthy, in seconds.
        request_deadline_s: Longest time in which a server answers no request, in seconds; more counts as a fault.
        sync_deadline_s: Longest time for each bucket of weights, in seconds; a longer one counts as a fault.
        options: Those of :class:`rlplug_rollout_vllm.options.VLLMServerOptions`; not with ``urls``.
    """

    capabilities: EngineCapabilities = EngineCapabilities(
        colocated=False,
        disaggregated=True,
        streaming=True,
        fp8_refit=torch.cuda.is_available(),
        tensor_parallel=True,
        stop_strings=True,
    )
    compile_cache_variables = CACHE_VARIABLES
    sampling_extra = SAMPLING_EXTRA
    backend_class = VLLMBackend

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
        chosen = VLLMServerOptions(**options)
        super().__init__(
            chosen, gpus, urls, api_key_env, start_deadline_s, request_deadline_s, sync_deadline_s, data_parallel_size
        )

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory | None:
        return planned_memory(self.options, policy, needs, len(self.gpus)) if self.gpus else None


def frontend_flags() -> list[str]:
    """Return the arguments of the API server, as far as the installed vLLM has them."""
    wanted = {
        "middleware": "rlplug_rollout_vllm.server_key.RequireKey",
        "enable_scale_out": True,  # /inference/v1/generate is behind it from vLLM 0.32 on, and always there in 0.26
        "disable_uvicorn_access_log": True,
    }
    for place in ("common", "launchers", "openai"):  # of vLLM 0.33, 0.32 and 0.26
        file = package_folder("vllm") / "entrypoints" / place / "cli_args.py"
        classes = declared_fields(file.read_text()) if file.is_file() else {}
        known = {field for name, fields in classes.items() if name.endswith("FrontendArgs") for field in fields}
        if "middleware" in known:
            return to_flags({name: value for name, value in wanted.items() if name in known})
    raise EngineFault("the installed vLLM has no arguments of an API server where its known versions have them.")


def keeps_states(policy: PolicySpec) -> bool:
    """Return whether a policy has layers whose recurrent states decay."""
    return any(name.rpartition(".")[2] in DECAYS for name in policy_weights(policy))
