"""verl's rollout engines: their options, which vLLM, SGLang and TensorRT-LLM name differently, turns and validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rlplug_migrate.conversion import Draft, Given
from rlplug_migrate.keys import OMIT, Key, none
from rlplug_migrate.verl.names import ACTOR, ROLLOUT

ENGINES: Final[Mapping[str, str]] = {
    "vllm": "VLLMRollout",
    "sglang": "SGLangRollout",
    "trtllm": "TRTLLMRollout",
    "hf": "HFRollout",
}
OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "gpu_memory_utilization": {
        "vllm": "gpu_memory_utilization",
        "sglang": "mem_fraction_static",
        "trtllm": "free_gpu_memory_fraction",
    },
    "tensor_model_parallel_size": dict.fromkeys(("vllm", "sglang", "trtllm"), "tensor_parallel_size"),
    "dtype": dict.fromkeys(("vllm", "sglang", "trtllm"), "dtype"),
    "max_num_seqs": {"vllm": "max_num_seqs", "sglang": "max_running_requests", "trtllm": "max_batch_size"},
    "max_num_batched_tokens": {"vllm": "max_num_batched_tokens", "trtllm": "max_num_tokens"},
    "max_model_len": {"vllm": "max_model_len", "sglang": "context_length", "trtllm": "context_length"},
    "enable_chunked_prefill": {"vllm": "enable_chunked_prefill", "trtllm": "enable_chunked_prefill"},
    "enable_prefix_caching": {
        "vllm": "enable_prefix_caching",
        "sglang": "disable_radix_cache",
        "trtllm": "enable_block_reuse",
    },
    "enforce_eager": {"vllm": "enforce_eager", "sglang": "disable_cuda_graph", "trtllm": "disable_cuda_graph"},
    "cudagraph_capture_sizes": {
        "vllm": "cudagraph_capture_sizes",
        "sglang": "cuda_graph_batch_sizes",
        "trtllm": "cuda_graph_batch_sizes",
    },
}
"""verl's options of an engine, and what each engine's class calls them here."""
_PASSED: Final[Mapping[str, str]] = {"vllm": "engine_args", "sglang": "server_args", "trtllm": "llm_args"}
"""Options of each class for arguments of the engine's own."""
_OWN: Final[Mapping[str, frozenset[str]]] = {
    "vllm": frozenset({"kv_cache_dtype"}),
    "sglang": frozenset({"attention_backend", "chunked_prefill_size", "kv_cache_dtype", "max_total_tokens"}),
    "trtllm": frozenset({"kv_cache_dtype", "scheduler_policy"}),
}
"""Arguments of an engine that are options of its class here."""
_CLASS: Final = "model.rollout.class_path"
_INIT: Final = "model.rollout.init_args"
_VAL: Final = f"{ROLLOUT}.val_kwargs"
_TURNS: Final = f"{ROLLOUT}.multi_turn"


def _targets(option: str) -> str:
    return ", ".join(dict.fromkeys(f"{_INIT}.{name}" for name in OPTIONS[option].values()))


KEYS: Final = (
    Key(f"{ROLLOUT}.name", "engine", _CLASS, values=ENGINES),
    *(
        Key(f"{ROLLOUT}.{option}", "engine", _targets(option), default=2 if option.startswith("tensor") else None)
        for option in OPTIONS
    ),
    Key(
        f"{ROLLOUT}.free_cache_engine", "engine", "model.memory.sleep_between_rollouts", read=lambda value: bool(value)
    ),
    Key(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        "engine",
        "model.weight_sync.bucket_mib",
        read=lambda value: value,
    ),
    Key(
        f"{ROLLOUT}.enable_rollout_routing_replay",
        "engine",
        "model.router_replay",
        read=lambda value: True if value else OMIT,
    ),
    Key(
        f"{ROLLOUT}.quantization",
        "engine",
        "model.weight_sync.dtype",
        "blocks of 128 x 128, quantised when they are sent",
        lambda value: "fp8_block" if value == "fp8" else OMIT,
    ),
    Key(f"{ROLLOUT}.engine_kwargs.*", "engine", f"{_INIT}.engine_args, {_INIT}.server_args, {_INIT}.llm_args"),
    Key(f"{_VAL}.temperature", "engine", "model.validation.sampling.temperature", default=0),
    Key(f"{_VAL}.top_p", "engine", "model.validation.sampling.top_p"),
    Key(f"{_VAL}.top_k", "engine", "model.validation.sampling.top_k"),
    Key(f"{_VAL}.do_sample", "engine", "model.validation.sampling.temperature", default=False),
    Key(f"{_VAL}.n", "engine", "model.validation.num_samples", default=1),
    Key(f"{_TURNS}.enable", "engine", "model.environment"),
    Key(f"{_TURNS}.max_assistant_turns", "engine", "model.turns.max_turns"),
    *none(
        "engine",
        "not there: give model.environment a ToolEnvironment with your functions, or a class of yours",
        f"{_TURNS}.tool_config_path",
        f"{_TURNS}.function_tool_path",
        f"{_TURNS}.interaction_config_path",
        f"{ROLLOUT}.agent.agent_loop_config_path",
        f"{ROLLOUT}.agent.default_agent_loop",
        "data.tool_config_path",
        "data.function_tool_path",
    ),
    *none("engine", "ToolEnvironment has call_format, which is found by itself", f"{_TURNS}.format"),
    *none("engine", "ToolEnvironment has output_limit_chars, in characters", f"{_TURNS}.max_tool_response_length"),
    *none("engine", "ToolEnvironment has max_calls, of a trajectory", f"{_TURNS}.max_parallel_calls"),
    *none("engine", "not there: tokens are never encoded a second time", f"{_TURNS}.*"),
    *none(
        "engine",
        "done by the engine plugin",
        f"{ROLLOUT}.mode",
        f"{ROLLOUT}.load_format",
        f"{ROLLOUT}.layered_summon",
        f"{ROLLOUT}.calculate_log_probs",
        f"{ROLLOUT}.logprobs_mode",
        f"{ROLLOUT}.disable_log_stats",
        f"{ROLLOUT}.skip_tokenizer_init",
        f"{ROLLOUT}.multi_stage_wake_up",
        f"{ROLLOUT}.agent.*",
        f"{ROLLOUT}.data_parallel_size",
        f"{ROLLOUT}.checkpoint_engine.*",
    ),
    *none("engine", "every request brings its seed, which follows seed_everything", f"{ROLLOUT}.seed"),
    *none("engine", "sets itself: 0 as temperature is greedy", f"{ROLLOUT}.do_sample"),
    *none("engine", "not there: completions end at their end token", f"{ROLLOUT}.ignore_eos"),
    *none("engine", "model.partial_rollout.over_provisioning counts groups", f"{ROLLOUT}.over_sample_rate"),
    *none("engine", "servers on GPUs of their own: VLLMServerRollout, SGLangServerRollout", f"{ROLLOUT}.nnodes"),
    *none("engine", "follows from trainer.devices", f"{ROLLOUT}.n_gpus_per_node"),
    *none(
        "engine",
        "an argument of the engine's own: engine_args, server_args or llm_args",
        f"{ROLLOUT}.expert_parallel_size",
        f"{ROLLOUT}.pipeline_model_parallel_size",
        f"{ROLLOUT}.scheduling_policy",
        f"{ROLLOUT}.limit_images",
    ),
    *none("engine", "router_replay: model.router_replay", f"{ACTOR}.router_replay.*"),
    *none("engine", "not there: text alone", f"{ROLLOUT}.val_kwargs.*"),
    *none("engine", "not there", f"{ROLLOUT}.*"),
)


def write_engine(given: Given, draft: Draft) -> None:
    """Write the engine's class and its options by its names; what it does not take is listed."""
    options = [name for name in OPTIONS if f"{ROLLOUT}.{name}" in given]
    name = given[f"{ROLLOUT}.name"]
    if name is None and not options:
        return
    engine = name or "vllm"
    if engine not in ENGINES:
        draft.lacks(f"{ROLLOUT}.name", f"not there: {engine}; {', '.join(ENGINES)} are")
        return
    draft.set(_CLASS, ENGINES[engine], f"{ROLLOUT}.name")
    for option in dict.fromkeys((*options, "tensor_model_parallel_size")):
        ours, full = OPTIONS[option].get(engine), f"{ROLLOUT}.{option}"
        if ours is None:
            draft.lacks(full, f"not there with {engine}, which sets it itself")
        else:
            draft.set(f"{_INIT}.{ours}", not given[full] if ours == "disable_radix_cache" else given[full], full)
    if engine != "vllm":
        draft.note(
            f"{ROLLOUT}.gpu_memory_utilization", _INIT, "a share of the memory that is free when the engine starts"
        )
    _write_passed(given, draft, engine)


def _write_passed(given: Given, draft: Draft, engine: str) -> None:
    """Write arguments of the engine's own."""
    if engine not in _PASSED:
        return
    passed: dict[str, Any] = {}
    for name, value in given.below(f"{ROLLOUT}.engine_kwargs.{engine}.").items():
        if name in _OWN[engine]:
            draft.set(f"{_INIT}.{name}", value, f"{ROLLOUT}.engine_kwargs.{engine}.{name}")
        elif "." not in name:
            passed[name] = value
        else:
            draft.lacks(f"{ROLLOUT}.engine_kwargs.{engine}.{name}", "a block: give it in the engine's own arguments")
    if passed:
        draft.settings[f"{_INIT}.{_PASSED[engine]}"] = passed


def write_validation_sampling(given: Given, draft: Draft) -> None:
    """Write how validation draws, where it is not greedy, and the limit of turns."""
    if given[f"{_TURNS}.enable"]:
        draft.lacks(
            f"{_TURNS}.enable", "set model.environment: ToolEnvironment with your functions, or a class of yours"
        )
        if f"{_TURNS}.max_assistant_turns" in given:
            name = f"{_TURNS}.max_assistant_turns"
            draft.set("model.turns.max_turns", given[name], name)
    if not given[f"{_VAL}.do_sample"] or "data.val_files" not in given:
        return
    for name in ("temperature", "top_p", "top_k"):
        if f"{_VAL}.{name}" in given:
            value = given[f"{_VAL}.{name}"]
            draft.set(
                f"model.validation.sampling.{name}", max(0, value) if name == "top_k" else value, f"{_VAL}.{name}"
            )
    draft.set("model.validation.num_samples", given[f"{_VAL}.n"], f"{_VAL}.n")
