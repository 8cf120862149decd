"""What of SGLang can be set: the knobs of its tuning guides by name, and the rest through ``server_args``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal

from rlplug_engines.colocated import AdviceKeys, EngineOptions, PassThrough, deciding

from rlplug.errors import ConfigError
from rlplug.interfaces import PolicySpec
from rlplug_rollout_sglang.sampler import FLAG
from rlplug_rollout_sglang.versions import sglang_argument_names

CONTEXT_MARGIN: Final = 8
"""Tokens that SGLang keeps free at the end of a context: 5 of a prompt, 2 of a completion, and one more."""

ENVIRONMENT: Final = {FLAG: "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
"""What the environment of SGLang must have: its sampler, and the margin, which no request reaches."""

BESIDE_TRAINERS: Final = ENVIRONMENT | {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
"""On GPUs of which trainers have parts already, and not all as much: SGLang would refuse to start."""

CACHE_VARIABLES: Final[Mapping[str, str]] = {"SGLANG_CACHE_DIR": "sglang", "SGLANG_DG_CACHE_DIR": "sglang/deep_gemm"}
"""Where SGLang keeps what it compiles, and DeepGEMM's kernels; read in its ``srt/environ.py``, and not run."""

EAGER_ADMISSION: Final = 0.3
"""``schedule_conservativeness`` that SGLang's tuning guide names where requests wait beside a KV cache with room."""

SAMPLING_BACKEND: Final = "rlplug"
"""The name under which :mod:`rlplug_rollout_sglang.sampler` registers."""

RESERVED: Final = {
    "model_path": "model.policy.path names it",
    **dict.fromkeys(("tokenizer_path", "skip_tokenizer_init", "tokenizer_worker_num"), "token ids go in and out"),
    "load_format": "weights come from the trainer",
    "weight_version": "it is the policy's",
    "enable_weights_cpu_backup": "weights that slept are sent again",
    "sampling_backend": "the plugin brings one that draws by seed and returns the logprobs of what it drew from",
    "enable_custom_logit_processor": "logprobs are of the distribution that model.sampling asks for",
    "preferred_sampling_params": "model.sampling says how to draw",
    "enable_memory_saver": "model.memory.sleep_between_rollouts asks for it",
    "tp_size": "rollout.tensor_parallel_size has it",
    "dp_size": "each engine is one replica: the trainer's ranks, or SGLangServerRollout, have as many as fit",
    **dict.fromkeys(("pp_size", "nnodes", "node_rank", "dist_init_addr"), "an engine is on one host"),
    **dict.fromkeys(("base_gpu_id", "gpu_id_step", "host", "port"), "it follows from where the engine runs"),
    **dict.fromkeys(("api_key", "admin_api_key"), "it follows from where the engine runs"),
    "custom_sigquit_handler": "the plugin notices when a process of SGLang ends",
    "incremental_streaming_output": "it follows from how completions are read",
    "speculative_algorithm": "the plugin's sampler draws one token at a time",
}
"""Arguments of SGLang that the plugin sets itself, or that cannot be set beside what it sets, and why."""

FORMER_NAMES: Final = {
    "cuda_graph_bs_decode": "cuda_graph_bs",
    "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
    "disable_prefill_cuda_graph": "disable_piecewise_cuda_graph",
}
"""What arguments are called in 0.5.13, where they are called otherwise."""

OWN_NAMES: Final = {
    "tp_size": "tensor_parallel_size",
    "random_seed": "seed",
    **dict.fromkeys(("cuda_graph_bs_decode", "cuda_graph_bs"), "cuda_graph_batch_sizes"),
    **dict.fromkeys(("cuda_graph_max_bs_decode", "cuda_graph_max_bs"), "cuda_graph_max_batch_size"),
    **dict.fromkeys(("disable_prefill_cuda_graph", "disable_piecewise_cuda_graph"), "cuda_graphs_for_prompts"),
}
"""Arguments of SGLang for which there is an option of another name."""


@dataclass(frozen=True)
class SGLangOptions(EngineOptions):
    """How an engine is built. What is ``null`` is left to SGLang, which chooses by model and device.

    Args:
        gpu_memory_utilization: Sets ``mem_fraction_static``.
        max_model_len: Sets ``context_length``.
        max_num_seqs: Sets ``max_running_requests``.
        max_num_batched_tokens: Sets ``chunked_prefill_size``.
        mem_fraction_static: Share of the memory that is free when the engine starts, for weights and KV cache; 0.5 by
            default. SGLang measures it before it loads weights: the KV cache is what is free after that, without ``1 -
            mem_fraction_static`` of what was free before. Activations and CUDA graphs live in the rest, beside the
            trainer. Raise it when requests wait; with ``model.memory.sleep_between_rollouts`` the update has that
            memory too.
        max_total_tokens: Size of the KV cache in tokens, where that is less than ``mem_fraction_static`` leaves.
        kv_cache_dtype: ``auto`` is that of the weights; ``fp8_e5m2`` and ``fp8_e4m3`` hold twice the tokens in the
            same memory.
        dtype: Dtype of weights and activations; ``auto`` is the policy's.
        context_length: Longest prompt and completion together, in tokens; by default the policy's context. The KV cache
            must hold one such sequence.
        max_running_requests: Requests that run at once. By default as many as SGLang finds room for.
        chunked_prefill_size: Prompt tokens of one pass; longer prompts are cut. ``-1`` cuts none.
        attention_backend: Kernels of attention, such as ``fa3``, ``flashinfer`` or ``triton``.
        disable_radix_cache: Compute a prompt anew for each of its completions: no prefix cache.
        disable_cuda_graph: No CUDA graphs: starts sooner, and generates slower.
        cuda_graph_batch_sizes: Batch sizes for which CUDA graphs are captured.
        cuda_graph_max_batch_size: Largest batch size with a CUDA graph, where SGLang chooses the others.
        cuda_graphs_for_prompts: Capture and compile graphs for passes over prompts too. It pays where prompts are short
            and many.
        sleep_on_idle: Let the engine's processes wait while there are no requests. Without it each keeps a core busy.
        tensor_parallel_size: GPUs that share one model.
        seed: Seed of SGLang itself; every request brings its own.
        log_level: Level from which SGLang's own log is shown. With ``error``, what it writes is shown when it fails.
        server_args: Any other argument of SGLang's ``ServerArgs``, by name; checked against the installed version.
    """

    share_key: ClassVar[str] = "mem_fraction_static"
    context_key: ClassVar[str] = "context_length"
    requests_key: ClassVar[str] = "max_running_requests"
    prefill_key: ClassVar[str] = "chunked_prefill_size"
    batch_sizes_key: ClassVar[str | None] = "cuda_graph_batch_sizes"
    positive: ClassVar = ("max_total_tokens", "context_length", "max_running_requests", "cuda_graph_max_batch_size")
    pass_through: ClassVar[PassThrough] = PassThrough(
        "server_args", "SGLang", RESERVED, OWN_NAMES, weight_formats=("quantization", "json_model_override_args")
    )

    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    kv_cache_dtype: str = deciding("auto")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = deciding("auto")
    context_length: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    attention_backend: str | None = None
    disable_radix_cache: bool = False
    disable_cuda_graph: bool = False
    cuda_graph_batch_sizes: list[int] | None = None
    cuda_graph_max_batch_size: int | None = None
    cuda_graphs_for_prompts: bool = False
    sleep_on_idle: bool = True
    tensor_parallel_size: int = 1
    seed: int = 0
    log_level: Literal["debug", "info", "warning", "error"] = "error"
    server_args: dict[str, Any] = deciding({})

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.chunked_prefill_size
        if size is not None and size < 1 and size != -1:
            key = f"rollout.{self.written('chunked_prefill_size')}"
            raise ConfigError(f"{key} is {size}: give a positive number, or -1 to cut no prompt.")

    def advice_keys(self, on_gpu: bool = True) -> AdviceKeys:
        keys, graphs = super().advice_keys(on_gpu), "rollout.cuda_graph_max_batch_size"
        if self.cuda_graph_batch_sizes is not None:
            graphs = "the largest of rollout.cuda_graph_batch_sizes"
        if self.max_total_tokens is not None:
            keys = replace(keys, memory=f"rollout.max_total_tokens from {self.max_total_tokens}, or {keys.memory}")
        # it keeps room for the longest possible completions of those that run
        admission = f"rollout.server_args.schedule_conservativeness to {EAGER_ADMISSION:g}"
        return replace(keys, admission=admission, graphs=graphs)

    def arguments(self, policy: PolicySpec) -> dict[str, Any]:
        """Return keyword arguments for the installed ``ServerArgs``, without those that follow from where it runs.

        Raises:
            ConfigError: ``server_args`` names what is set elsewhere, or what the installed SGLang does not have.
        """
        known = sglang_argument_names()
        arguments: dict[str, Any] = {
            "model_path": policy.path,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "context_length": self.longest(policy) + CONTEXT_MARGIN,
            "dtype": self.dtype_name(policy),
            "sampling_backend": SAMPLING_BACKEND,
            "tp_size": self.tensor_parallel_size,
            "random_seed": self.seed,
            "disable_prefill_cuda_graph": self.disable_cuda_graph or not self.cuda_graphs_for_prompts,
            "mem_fraction_static": self.share,
            **self.given("max_total_tokens", "kv_cache_dtype", "max_running_requests"),
            **self.given("chunked_prefill_size", "attention_backend", "disable_radix_cache", "disable_cuda_graph"),
            **self.given("sleep_on_idle", "log_level"),
        }
        for name in ("cuda_graph_bs_decode", "cuda_graph_max_bs_decode"):
            if (value := getattr(self, OWN_NAMES[name])) is not None:
                arguments[name] = value
        if policy.fp8 is not None:
            arguments["json_model_override_args"] = json.dumps(
                {"quantization_config": policy.fp8.quantization_config()}
            )
        named = {name if name in known else FORMER_NAMES.get(name, name): value for name, value in arguments.items()}
        return named | self.passed_arguments(policy, known)

    def sizes_for(self, policy: PolicySpec, requests: int, prompt_tokens: int) -> dict[str, Any]:
        sizes = {"max_running_requests": requests}
        if self.chunked_prefill_size != -1:
            sizes["chunked_prefill_size"] = prompt_tokens
        return sizes if self.disable_cuda_graph else sizes | self.graphs_for(requests)
