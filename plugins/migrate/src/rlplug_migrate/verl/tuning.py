"""verl's keys of speed and memory of the trainer: checkpointing, kernels, offload and the mesh of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rlplug_migrate.conversion import Draft, Given
from rlplug_migrate.keys import Key, none, same
from rlplug_migrate.verl.names import ACTOR, FSDP, MODEL, REF

_LIST: Final = "model.optimizations"
_STRATEGY: Final = "trainer.strategy"
_MESH: Final = f"{_STRATEGY}.init_args"
OPTIMIZATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "GradientCheckpointing": (f"{MODEL}.enable_gradient_checkpointing",),
    "ActivationOffload": (f"{MODEL}.enable_activation_offload",),
    "Liger": (f"{MODEL}.use_liger",),
    "FusedLogprobs": (f"{MODEL}.use_fused_kernels", f"{ACTOR}.use_fused_kernels"),
    "EntropyChunking": (f"{ACTOR}.entropy_from_logits_with_chunking", f"{FSDP}.entropy_from_logits_with_chunking"),
    "EntropyCheckpointing": (f"{ACTOR}.entropy_checkpointing", f"{FSDP}.entropy_checkpointing"),
    "ForwardPrefetch": (f"{FSDP}.forward_prefetch",),
}
"""Our optimisations, and verl's switches of each."""
_CHUNK: Final = f"{ACTOR}.entropy_from_logits_chunk_size"
_LORA: Final[Mapping[str, tuple[str, ...]]] = {
    "rank": (f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"),
    "alpha": (f"{MODEL}.lora_alpha", f"{MODEL}.lora.alpha"),
    "targets": (f"{MODEL}.target_modules", f"{MODEL}.lora.target_modules"),
    "path": (f"{MODEL}.lora_adapter_path", f"{MODEL}.lora.adapter_path"),
}
_ULYSSES: Final = (f"{ACTOR}.ulysses_sequence_parallel_size", f"{FSDP}.ulysses_sequence_parallel_size")

KEYS: Final = (
    Key(f"{MODEL}.enable_gradient_checkpointing", "tuning", f"{_LIST}: GradientCheckpointing", default=True),
    *(
        Key(name, "tuning", f"{_LIST}: {ours}")
        for ours, names in OPTIMIZATIONS.items()
        for name in names
        if ours != "GradientCheckpointing"
    ),
    Key(_CHUNK, "tuning", f"{_LIST}: EntropyChunking, chunk_size"),
    *(Key(name, "tuning", f"model.lora.{ours}") for ours, names in _LORA.items() for name in names),
    Key(f"{FSDP}.param_offload", "tuning", "model.memory.offload", "goes to host memory while the engine generates"),
    Key(f"{FSDP}.optimizer_offload", "tuning", "model.memory.offload"),
    Key(f"{FSDP}.fsdp_size", "tuning", f"{_MESH}.replicate", "counts copies; verl's counts the GPUs of one"),
    Key(f"{FSDP}.reshard_after_forward", "tuning", f"{_MESH}.reshard_after_forward"),
    *(Key(name, "tuning", f"{_MESH}.sequence") for name in _ULYSSES),
    Key(f"{FSDP}.dtype", "tuning", "model.policy.dtype", default="bfloat16"),
    Key(f"{ACTOR}.strategy", "tuning", _STRATEGY, "FSDP2 by default; Megatron is not there"),
    same(f"{MODEL}.path", "trainer", "model.policy.path", default="~/models/deepseek-llm-7b-chat"),
    same(f"{MODEL}.override_config.attn_implementation", "tuning", "model.policy.attn_implementation"),
    *none(
        "tuning",
        "follows from model.memory.offload: the reference policy moves with the weights",
        f"{REF}.fsdp_config.param_offload",
    ),
    *none("tuning", "sets itself: sequences are packed, without padding", f"{MODEL}.use_remove_padding"),
    *none("tuning", "sets itself: sequences are packed, without padding", f"{ACTOR}.use_remove_padding"),
    *none("tuning", "sets itself: sequences are packed, without padding", "critic.model.use_remove_padding"),
    *none("tuning", "sets itself: sequences are packed, without padding", f"{ACTOR}.pad_to_length*"),
    *none("tuning", "sets itself: sequences are packed, without padding", f"{FSDP}.pad_to_length*"),
    *none(
        "tuning",
        "compiles the entropy in verl; FusedLogprobs compiles here, and CompileBlocks compiles whole blocks",
        f"{ACTOR}.use_torch_compile",
        f"{REF}.use_torch_compile",
        f"{FSDP}.use_torch_compile",
    ),
    *none("tuning", "sets itself: prompts are computed once a group (share_prefixes)", f"{ACTOR}.use_prefix_grouper"),
    *none(
        "tuning",
        "the optimizer's weights are always float32; gradients too",
        f"{FSDP}.model_dtype",
        f"{FSDP}.mixed_precision*",
    ),
    *none(
        "tuning",
        "not there: gradients stay on the GPU, and offload_policy of FSDP2",
        f"{FSDP}.grad_offload",
        f"{FSDP}.offload_policy",
    ),
    *none(
        "tuning",
        "the policy's optimizations, mesh and offload hold for the critic and the reference policy too",
        f"{REF}.*",
        "critic.fsdp*",
        "critic.model.fsdp_config.*",
        "critic.model.*",
        "critic.ulysses_sequence_parallel_size",
        "critic.strategy",
    ),
    *none(
        "tuning",
        "gradients are reduced once a mini-batch: trainer.strategy.init_args.sync_every_micro_batch",
        f"{FSDP}.use_no_sync_for_gradient_accumulation",
    ),
    *none("tuning", "set trainer.deterministic", f"{FSDP}.full_determinism", f"{FSDP}.seed"),
    *none("tuning", "not there: each block is a unit of FSDP2", f"{FSDP}.wrap_policy.*", f"{FSDP}.use_orig_params"),
    *none("tuning", "not there: quantised training", f"{FSDP}.qat.*", f"{ACTOR}.qat.*"),
    *none(
        "tuning",
        "not there: Megatron; trainer.strategy.init_args.tensor, or the trainer TorchTitan",
        f"{ACTOR}.megatron.*",
        f"{ACTOR}.veomni.*",
        f"{ACTOR}.torchtitan.*",
        "model_engine",
    ),
    *none("tuning", "not there: of another device or model engine", f"{FSDP}.*"),
    *none("tuning", "FusedLogprobs has one implementation, fused by torch.compile", f"{MODEL}.fused_kernel_options.*"),
    *none("tuning", "not there: a long MLP is cut by trainer.strategy.init_args.sequence", f"{MODEL}.tiled_mlp.*"),
    *none(
        "tuning",
        "not there: code of a model's own repository is not run",
        f"{MODEL}.trust_remote_code",
        f"{MODEL}.external_lib",
        "data.trust_remote_code",
    ),
    *none(
        "tuning",
        "not there: model.lora has rank, alpha, targets, path and sync",
        f"{MODEL}.lora.*",
        f"{MODEL}.exclude_modules",
    ),
    *none("tuning", "not there: draft tokens", f"{MODEL}.mtp.*"),
    *none(
        "tuning",
        "not there: configuration and tokenizer are those of model.policy.path",
        f"{MODEL}.hf_config_path",
        f"{MODEL}.tokenizer_path",
        f"{MODEL}.custom_chat_template",
        f"{MODEL}.override_config*",
    ),
    *none("tuning", "not there: copies to shared memory", f"{MODEL}.use_shm", "data.use_shm"),
    *none("tuning", "not there", f"{MODEL}.*"),
)


def write_optimizations(given: Given, draft: Draft) -> None:
    """Write the list of optimisations, and adapters."""
    chosen = [ours for ours, names in OPTIMIZATIONS.items() if any(given[name] is True for name in names)]
    if "FusedLogprobs" in chosen:
        for name in [each for each in chosen if each.startswith("Entropy")]:
            chosen.remove(name)
            for switch in OPTIMIZATIONS[name]:
                draft.lacks(switch, "not used: FusedLogprobs computes entropies in chunks already")
    for name in chosen:
        item: dict[str, object] = {"class_path": name}
        if name == "EntropyChunking" and _CHUNK in given:
            item["init_args"] = {"chunk_size": given[_CHUNK]}
        draft.append(_LIST, item)
    if chosen == ["GradientCheckpointing"] and f"{MODEL}.enable_gradient_checkpointing" not in given:
        draft.from_defaults[_LIST] = f"default of {given.framework.name}"
    _write_lora(given, draft)


def _write_lora(given: Given, draft: Draft) -> None:
    if not given.first(*_LORA["rank"]):
        return
    for ours, names in _LORA.items():
        value = given.first(*names)
        if value is not None:
            whole = ours == "targets" and isinstance(value, str) and value != "all-linear"
            draft.settings[f"model.lora.{ours}"] = [value] if whole else value
    draft.settings.setdefault("model.lora.alpha", 16)


def write_memory(given: Given, draft: Draft) -> None:
    """Write what leaves the GPU while the engine generates."""
    weights, optimizer = given[f"{FSDP}.param_offload"], given[f"{FSDP}.optimizer_offload"]
    if weights:
        draft.set("model.memory.offload", "optimizer_and_weights", f"{FSDP}.param_offload")
    elif optimizer:
        draft.set("model.memory.offload", "optimizer", f"{FSDP}.optimizer_offload")


def write_mesh(given: Given, draft: Draft) -> None:
    """Write the mesh of GPUs, where it is not FSDP2 over all of them, and the dtype of passes."""
    sequence, size = given.first(*_ULYSSES), given[f"{FSDP}.fsdp_size"]
    num_gpus = given["trainer.n_gpus_per_node"] * given["trainer.nnodes"]
    mesh = {}
    if isinstance(size, int) and 0 < size < num_gpus:
        mesh["replicate"] = num_gpus // size
    if isinstance(sequence, int) and sequence > 1:
        mesh["sequence"] = sequence
    if given[f"{FSDP}.reshard_after_forward"] is False:
        mesh["reshard_after_forward"] = False
    if mesh:
        draft.settings[f"{_STRATEGY}.class_path"] = "rlplug.distributed.strategy.RLFSDP2Strategy"
        draft.settings.update({f"{_MESH}.{name}": value for name, value in mesh.items()})
    dtypes = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
    if (dtype := given[f"{FSDP}.dtype"]) in dtypes:
        draft.set("model.policy.dtype", dtypes[dtype], f"{FSDP}.dtype")
    else:
        draft.lacks(f"{FSDP}.dtype", f"not there: {dtype}; bfloat16 and float32 are")
    if given[f"{ACTOR}.strategy"] not in (None, "fsdp", "fsdp2"):
        draft.lacks(
            f"{ACTOR}.strategy", f"not there: {given[f'{ACTOR}.strategy']}; FSDP2 is, and the trainer TorchTitan"
        )
