"""TRL's generation: sampling, vLLM in its two modes, tools, and the model with its adapters."""

from __future__ import annotations

from typing import Any, Final

from rlplug_migrate.conversion import Draft, Given
from rlplug_migrate.keys import OMIT, Key, as_is, none, same

_CLASS: Final = "model.rollout.class_path"
_INIT: Final = "model.rollout.init_args"
_LIST: Final = "model.optimizations"
_SAMPLING: Final = "model.sampling"


def _dtype(value: Any) -> Any:
    return {"bfloat16": "bfloat16", "float32": "float32", "bf16": "bfloat16"}.get(value, OMIT)


KEYS: Final = (
    same("model_name_or_path", "trainer", "model.policy.path"),
    Key("dtype", "tuning", "model.policy.dtype", "the optimizer's weights are always float32", _dtype),
    Key("torch_dtype", "tuning", "model.policy.dtype", "the optimizer's weights are always float32", _dtype),
    Key(
        "attn_implementation",
        "tuning",
        "model.policy.attn_implementation",
        read=lambda value: value if str(value).startswith("flash_attention") else OMIT,
    ),
    Key("chat_template_kwargs", "data", "model.policy.chat_template_kwargs", read=as_is),
    same("temperature", "engine", f"{_SAMPLING}.temperature"),
    same("top_p", "engine", f"{_SAMPLING}.top_p"),
    same("top_k", "engine", f"{_SAMPLING}.top_k"),
    Key("min_p", "engine", f"{_SAMPLING}.extra"),
    Key("repetition_penalty", "engine", f"{_SAMPLING}.extra"),
    Key("generation_kwargs*", "engine", f"{_SAMPLING}.extra"),
    same("max_completion_length", "data", f"{_SAMPLING}.max_new_tokens", default=512),
    same("max_prompt_length", "data", "data.max_prompt_tokens", "refuses longer prompts, and cuts none"),
    Key("use_vllm", "engine", _CLASS),
    Key("vllm_mode", "engine", _CLASS, default="colocate"),
    Key("vllm_gpu_memory_utilization", "engine", f"{_INIT}.gpu_memory_utilization", default=0.3),
    Key("vllm_max_model_length", "engine", f"{_INIT}.max_model_len"),
    Key("vllm_tensor_parallel_size", "engine", f"{_INIT}.tensor_parallel_size"),
    Key("vllm_enable_sleep_mode", "engine", "model.memory.sleep_between_rollouts"),
    Key("vllm_server_base_url", "engine", f"{_INIT}.urls"),
    Key("vllm_server_host", "engine", f"{_INIT}.urls", default="0.0.0.0"),
    Key("vllm_server_port", "engine", f"{_INIT}.urls", default=8000),
    Key("vllm_server_timeout", "engine", f"{_INIT}.start_deadline_s"),
    Key(
        "max_tool_calling_iterations", "engine", "model.turns.max_turns", "counts turns, the last one without calls too"
    ),
    Key("gradient_checkpointing", "tuning", f"{_LIST}: GradientCheckpointing", default=True),
    Key("use_liger_kernel", "tuning", f"{_LIST}: Liger"),
    Key("torch_compile", "tuning", f"{_LIST}: CompileBlocks"),
    Key("use_peft", "tuning", "model.lora"),
    Key("lora_r", "tuning", "model.lora.rank", default=16),
    Key("lora_alpha", "tuning", "model.lora.alpha", default=32),
    Key("lora_target_modules", "tuning", "model.lora.targets"),
    *none("tuning", "not there: adapters have no dropout", "lora_dropout"),
    *none(
        "tuning",
        "not there: plain LoRA alone",
        "use_dora",
        "use_rslora",
        "lora_modules_to_save",
        "lora_target_parameters",
        "lora_task_type",
    ),
    *none("tuning", "not built: frozen weights in 4 or 8 bits; see docs/lora.md", "load_in_*bit", "bnb_*", "use_bnb_*"),
    *none("engine", "done by the engine plugin", "vllm_group_port", "vllm_model_impl", "cache_implementation"),
    *none(
        "engine",
        "not there: transformers' continuous batching; HFRollout generates in batches",
        "use_transformers_*",
        "transformers_continuous_*",
    ),
    *none("engine", "give it in model.sampling.extra, as the engine calls it", "vllm_structured_outputs_regex"),
    *none("engine", "sets itself: a rollout engine has weights of its own", "ds3_gather_for_generation"),
    *none("tuning", "sets itself: dropout is off", "disable_dropout"),
    *none("tuning", "sets itself: logprobs are computed in float32", "cast_lm_head_to_fp32"),
    *none("tuning", "not there: name a folder or a model of the hub", "model_revision", "model_init_kwargs*"),
    *none("tuning", "not there: code of a model's own repository is not run", "trust_remote_code"),
    *none(
        "tuning",
        "options of the optimisation are its init_args",
        "gradient_checkpointing_kwargs*",
        "liger_kernel_config*",
        "torch_compile_*",
        "activation_checkpointing*",
    ),
)


def write_engine(given: Given, draft: Draft) -> None:
    """Write the engine, what it samples with, optimisations and adapters."""
    if not given["use_vllm"]:
        draft.set(_CLASS, "HFRollout", "use_vllm")
        draft.note("use_vllm", _CLASS, "transformers' own generate is slow: an engine such as VLLMRollout is usual")
    elif given["vllm_mode"] == "server":
        _write_server(given, draft)
    else:
        _write_colocated(given, draft)
    _write_extra(given, draft)
    for name, ours in (
        ("gradient_checkpointing", "GradientCheckpointing"),
        ("use_liger_kernel", "Liger"),
        ("torch_compile", "CompileBlocks"),
    ):
        if given.values.get(name, given[name]) is True:
            draft.append(_LIST, {"class_path": ours})
    if _LIST in draft.settings and "gradient_checkpointing" not in given and len(draft.settings[_LIST]) == 1:
        draft.from_defaults[_LIST] = f"default of {given.framework.name}"
    if given["use_peft"]:
        for name, key in (("lora_r", "rank"), ("lora_alpha", "alpha"), ("lora_target_modules", "targets")):
            if (value := given[name]) is not None:
                is_name = key == "targets" and isinstance(value, str) and value != "all-linear"
                draft.set(f"model.lora.{key}", [value] if is_name else value, name)
    if given["max_tool_calling_iterations"]:
        draft.set("model.turns.max_turns", given["max_tool_calling_iterations"] + 1, "max_tool_calling_iterations")
    if "torch_dtype" not in given and "dtype" not in given:
        draft.settings["model.policy.dtype"] = "bfloat16"
        draft.from_defaults["model.policy.dtype"] = "default of TRL"


def _write_colocated(given: Given, draft: Draft) -> None:
    draft.set(_CLASS, "VLLMRollout", "use_vllm")
    for name, key in (
        ("vllm_gpu_memory_utilization", "gpu_memory_utilization"),
        ("vllm_max_model_length", "max_model_len"),
        ("vllm_tensor_parallel_size", "tensor_parallel_size"),
    ):
        if given[name] is not None:
            draft.set(f"{_INIT}.{key}", given[name], name)
    if "vllm_enable_sleep_mode" in given:
        sleeps = bool(given["vllm_enable_sleep_mode"])
        draft.set("model.memory.sleep_between_rollouts", sleeps, "vllm_enable_sleep_mode")


def _write_server(given: Given, draft: Draft) -> None:
    url = given["vllm_server_base_url"] or f"http://{given['vllm_server_host']}:{given['vllm_server_port']}"
    draft.set(_CLASS, "VLLMServerRollout", "vllm_mode")
    draft.set(f"{_INIT}.urls", [url], "vllm_server_base_url")
    if "vllm_server_timeout" in given:
        draft.set(f"{_INIT}.start_deadline_s", float(given["vllm_server_timeout"]), "vllm_server_timeout")
    draft.note("vllm_mode", f"{_INIT}.urls", "start vLLM as docs/rollout-engines.md says, not by trl vllm-serve")


def _write_extra(given: Given, draft: Draft) -> None:
    extra = {name: given[name] for name in ("min_p", "repetition_penalty") if name in given}
    for name, value in given.below("generation_kwargs.").items():
        if name in ("temperature", "top_p", "top_k"):
            draft.set(f"{_SAMPLING}.{name}", value, f"generation_kwargs.{name}")
        else:
            extra[name] = value
    if extra:
        draft.settings[f"{_SAMPLING}.extra"] = extra
