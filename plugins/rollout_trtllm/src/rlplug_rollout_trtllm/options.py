"""What of TensorRT-LLM can be set: the knobs of its tuning guides by name, and the rest through ``llm_args``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from rlplug_engines.colocated import EngineOptions, EngineStats, PassThrough, deciding
from transformers import AutoConfig

from rlplug.errors import ConfigError
from rlplug.interfaces import PolicySpec
from rlplug.models.hf_files import pretrained
from rlplug_rollout_trtllm.surface import EXTENSION, PLACING

DEFAULT_MAX_NUM_TOKENS: Final = 8192
"""The engine's own, which a prompt may exceed with chunked prefill alone."""

RESERVED: Final = {
    "model": "model.policy.path names it",
    "tokenizer": "token ids go in and out",
    "skip_tokenizer_init": "token ids go in and out",
    "trust_remote_code": "nothing of a checkpoint is executed",
    "backend": "weights can be sent to the pytorch backend alone",
    "load_format": "weights come from the trainer",
    "sleep_config": "model.memory.sleep_between_rollouts asks for it, and what slept is sent again",
    "enable_sleep": "model.memory.sleep_between_rollouts asks for it",
    "sampler_type": "logprobs are those of the sampler that is the default",
    "ray_worker_extension_cls": "the plugin brings one",
    **dict.fromkeys(("ray_placement_config", *PLACING), "it follows from where the engine runs"),
    "orchestrator_type": "weights can be sent to Ray's workers alone",
    "pipeline_parallel_size": "weights reach the workers of one model as whole tensors",
    "max_input_len": "rollout.context_length has it",
    "speculative_config": "logprobs are of the distribution that model.sampling asks for",
    "quant_config": "model.weight_sync.fp8 says which weights travel in FP8",
}
"""Arguments that the plugin sets itself, or that cannot be set beside what it sets, and why."""

OWN_NAMES: Final = {
    "max_seq_len": "context_length",
    "kv_cache_config": "free_gpu_memory_fraction (or kv_cache_dtype, enable_block_reuse, tokens_per_block)",
    "cuda_graph_config": "cuda_graph_batch_sizes (or cuda_graph_max_batch_size, disable_cuda_graph)",
    "scheduler_config": "scheduler_policy",
}
"""Arguments for which there is an option of another name."""

VISION: Final = ("vision_config", "visual", "image_token_id", "image_token_index", "audio_config")


@dataclass(frozen=True)
class TRTLLMOptions(EngineOptions):
    """How an engine is built. What is ``null`` is left to TensorRT-LLM.

    Args:
        gpu_memory_utilization: Sets ``free_gpu_memory_fraction``.
        max_model_len: Sets ``context_length``.
        max_num_seqs: Sets ``max_batch_size``.
        max_num_batched_tokens: Sets ``max_num_tokens``.
        free_gpu_memory_fraction: Share of the memory that is free when weights are loaded, for the KV cache; 0.5 by
            default. Activations and CUDA graphs live in the rest, beside the trainer. Raise it when requests wait; with
            ``model.memory.sleep_between_rollouts`` the update has that memory too.
        kv_cache_dtype: ``auto`` is that of the weights; ``fp8`` holds twice the tokens in the same memory.
        enable_block_reuse: Keep blocks of the KV cache for prompts that begin alike.
        tokens_per_block: Tokens of a block of the KV cache.
        dtype: Dtype of weights and activations; ``auto`` is the policy's.
        context_length: Longest prompt and completion together, in tokens; by default the policy's context.
        max_batch_size: Requests that run at once.
        max_num_tokens: Tokens of one pass. Without ``enable_chunked_prefill`` it must hold the
            longest prompt, and does by default.
        enable_chunked_prefill: Cut long prompts into passes of ``max_num_tokens``.
        disable_overlap_scheduler: Prepare a pass only when the former is done. Slower.
        scheduler_policy: ``max_utilization`` starts requests as long as there is room, and may have to pause some;
            ``guaranteed_no_evict`` starts those alone that can run to their end.
        disable_cuda_graph: No CUDA graphs: starts sooner, and generates slower.
        cuda_graph_batch_sizes: Batch sizes for which CUDA graphs are captured.
        cuda_graph_max_batch_size: Largest batch size with a CUDA graph, where TensorRT-LLM chooses the others.
        tensor_parallel_size: GPUs that share one model.
        moe_tensor_parallel_size: GPUs of an engine that share each expert.
        moe_expert_parallel_size: GPUs of an engine among which the experts are distributed.
        llm_args: Any other argument of TensorRT-LLM's ``AsyncLLM``, by name; checked against the installed version.
    """

    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None
    kv_cache_dtype: str = deciding("auto")
    enable_block_reuse: bool = True
    tokens_per_block: int | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = deciding("auto")
    context_length: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    scheduler_policy: Literal["max_utilization", "guaranteed_no_evict"] | None = None
    disable_cuda_graph: bool = False
    cuda_graph_batch_sizes: list[int] | None = None
    cuda_graph_max_batch_size: int | None = None
    tensor_parallel_size: int = 1
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    llm_args: dict[str, Any] = deciding({})

    share_key: ClassVar[str] = "free_gpu_memory_fraction"
    context_key: ClassVar[str] = "context_length"
    requests_key: ClassVar[str] = "max_batch_size"
    prefill_key: ClassVar[str] = "max_num_tokens"
    positive: ClassVar[tuple[str, ...]] = (
        *("context_length", "max_batch_size", "max_num_tokens", "tokens_per_block", "cuda_graph_max_batch_size"),
        *("moe_tensor_parallel_size", "moe_expert_parallel_size"),
    )
    batch_sizes_key: ClassVar[str | None] = "cuda_graph_batch_sizes"
    pass_through: ClassVar[PassThrough] = PassThrough("llm_args", "TensorRT-LLM", RESERVED, OWN_NAMES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cuda_graph_batch_sizes is not None and self.cuda_graph_max_batch_size is not None:
            raise ConfigError("rollout.cuda_graph_batch_sizes names them all: leave cuda_graph_max_batch_size out.")
        tensor, experts = self.moe_tensor_parallel_size or 1, self.moe_expert_parallel_size or 1
        if self.given("moe_tensor_parallel_size", "moe_expert_parallel_size") and (
            tensor * experts != self.tensor_parallel_size
        ):
            raise ConfigError(
                f"rollout.moe_tensor_parallel_size {tensor} times moe_expert_parallel_size {experts} is not "
                f"tensor_parallel_size {self.tensor_parallel_size}: the GPUs of one model share its experts so."
            )

    def stats(self, is_alone: bool = True) -> EngineStats:
        """Return counters of tokens and time; the scheduler is not looked at, and the cache's size not told.

        Slots are compared with the requests of a trainer that has the engine ``is_alone``.
        """
        slots = (self.max_batch_size or 0) if is_alone else 0
        return EngineStats(slots, kv_cache_tokens=0, keys=self.advice_keys(), observes_scheduler=False)

    def arguments(self, policy: PolicySpec, known: Collection[str]) -> dict[str, Any]:
        """Return the arguments of an engine as plain data, without those that follow from where it runs.

        Configurations of their own are dictionaries of their fields. ``None`` for ``cuda_graph_config`` means without.
        ``ConfigError`` when ``llm_args`` has what is set elsewhere, or not ``known``, or a prompt exceeds a pass.
        """
        extra = self.passed_arguments(policy, known)
        model = extra.pop("model_kwargs", {})
        if "quantization_config" in model:
            raise ConfigError(
                f"rollout.llm_args.model_kwargs.quantization_config cannot be set: {RESERVED['quant_config']}."
            )
        if policy.fp8 is not None:
            model = model | {"quantization_config": policy.fp8.quantization_config()}
        longest = self.longest(policy)
        cache, graphs = {"dtype": self.kv_cache_dtype}, {"enable_padding": True}
        sizes = self.given("cuda_graph_batch_sizes", "cuda_graph_max_batch_size")
        graphs |= {name.removeprefix("cuda_graph_"): value for name, value in sizes.items()}
        arguments = {
            "model": policy.path,
            "backend": "pytorch",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": self.dtype_name(policy),
            "max_seq_len": longest,
            "max_input_len": longest,  # else prompts of more than 1,024 tokens are refused
            "ray_worker_extension_cls": EXTENSION,
            "kv_cache_config": {
                **cache,
                "free_gpu_memory_fraction": self.share,
                **self.given("enable_block_reuse", "tokens_per_block"),
            },
            "cuda_graph_config": None if self.disable_cuda_graph else graphs,
            **self.given("tensor_parallel_size", "enable_chunked_prefill", "disable_overlap_scheduler"),
            **self.given("max_batch_size", "moe_tensor_parallel_size", "moe_expert_parallel_size"),
            **self._pass_size(longest),
        }
        if self.scheduler_policy is not None:
            arguments["scheduler_config"] = {"capacity_scheduler_policy": self.scheduler_policy}
        return arguments | extra | ({"model_kwargs": model} if model else {})

    def sizes_for(self, policy: PolicySpec, requests: int, prompt_tokens: int) -> dict[str, Any]:
        # without chunks, a pass holds the longest prompt
        tokens = prompt_tokens if self.enable_chunked_prefill else max(prompt_tokens, self.longest(policy))
        sizes = {"max_batch_size": requests, "max_num_tokens": tokens}
        return sizes if self.disable_cuda_graph else sizes | self.graphs_for(requests)

    def _pass_size(self, longest: int) -> dict[str, int]:
        if self.enable_chunked_prefill:
            return self.given("max_num_tokens")
        size = self.max_num_tokens or max(longest, DEFAULT_MAX_NUM_TOKENS)
        if size < longest:
            raise ConfigError(
                f"rollout.{self.written('max_num_tokens')} is {size}, and a prompt may have up to {longest} tokens "
                f"(rollout.{self.written('context_length')}): raise it, or set enable_chunked_prefill."
            )
        return self.given("max_num_tokens") if size == DEFAULT_MAX_NUM_TOKENS else {"max_num_tokens": size}


def check_text_only(policy: PolicySpec) -> None:
    """Raise ``ConfigError`` for a model whose configuration has a part for images or sound."""
    config = pretrained(AutoConfig.from_pretrained, policy.path)
    if found := [name for name in VISION if getattr(config, name, None) is not None]:
        raise ConfigError(
            f"the model of model.policy.path {policy.path} has a {found[0]}: images and sound do not work with "
            "TensorRT-LLM here yet. Take a text model, or another engine."
        )
