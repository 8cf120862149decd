"""TorchTitan's decoders of Hugging Face configurations, which its own builders know by names of flavours alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from rlplug.errors import ConfigError
from rlplug.types import MeshSizes
from rlplug_trainer_titan.attention import packed_attention_config
from rlplug_trainer_titan.experts import use_own_parts
from rlplug_trainer_titan.float8 import Float8, convert_linears
from rlplug_trainer_titan.library import titan


@dataclass(frozen=True)
class Family:
    """A family of models that both libraries have."""

    module: str
    """TorchTitan's package of it, below ``torchtitan.models``."""
    name: str
    """Prefix of its classes in TorchTitan."""
    rope_types: frozenset[str]
    """Types of rotary embeddings that both compute alike."""


FAMILIES: Final = {
    "llama": Family("llama3", "Llama3", frozenset({"default", "llama3"})),
    "qwen3": Family("qwen3", "Qwen3", frozenset({"default"})),
    "qwen3_moe": Family("qwen3", "Qwen3", frozenset({"default"})),
}
"""Families by transformers' ``model_type``."""
OFF: Final = ("attention_bias", "mlp_bias", "use_sliding_window")
"""Options of transformers' configurations that TorchTitan's models of these families do not have."""


def sparse_layers(config: Any) -> list[int]:
    """Return the numbers of the layers that are mixtures of experts, by transformers' rule."""
    if not hasattr(config, "mlp_only_layers"):
        return []
    layers = range(0 if config.num_experts == 0 else config.num_hidden_layers)
    return [n for n in layers if n not in config.mlp_only_layers and (n + 1) % config.decoder_sparse_step == 0]


def check_config(config: Any, key: str, path: str, mesh: MeshSizes, expert: int) -> None:
    """Refuse a model that TorchTitan has not, would compute in another way, or cannot split so.

    Args:
        config: Configuration of transformers.
        key: Key of the model in the run's configuration, for messages.
        path: Folder of the model, for messages.
        mesh: Sizes of the mesh.
        expert: Ranks of expert parallelism.

    Raises:
        ConfigError: The message names the option of the model and the fix.
    """
    where, instead = f"{key}.path {path!r}", "Remove model.trainer to train it with transformers."
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ConfigError(
            f"{where}: TorchTitan trains models of type {', '.join(FAMILIES)} here, and this is "
            f"{config.model_type!r}. {instead}"
        )
    for option in OFF:
        if getattr(config, option, False):
            raise ConfigError(f"{where}: {option} is set, which TorchTitan's {family.name} does not have. {instead}")
    if config.hidden_act != "silu":
        raise ConfigError(f"{where}: hidden_act is {config.hidden_act!r}, and TorchTitan has silu alone. {instead}")
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in family.rope_types:
        known = " and ".join(sorted(family.rope_types))
        raise ConfigError(
            f"{where}: the type of its rotary embeddings is {rope_type!r}, and TorchTitan's {family.name} has {known} "
            f"here. {instead}"
        )
    _check_tensor(config, where, mesh.tensor, expert)
    _check_expert(config, where, mesh, expert)


def _check_tensor(config: Any, where: str, size: int, expert: int) -> None:
    problem, num_sparse = f"trainer.strategy.init_args.tensor is {size}", len(sparse_layers(config))
    options = ["num_attention_heads", "num_key_value_heads", "hidden_size"]
    if num_sparse < config.num_hidden_layers:
        options.append("intermediate_size")
    for option in options:
        if getattr(config, option) % size:
            raise ConfigError(
                f"{problem}, which does not divide {option}, {getattr(config, option)}, of {where}: give a divisor."
            )
    if num_sparse and size > 1 and expert == 1:
        raise ConfigError(
            f"{problem}, and TorchTitan 0.3 loses gradients where it splits each expert, of {where}, over these ranks. "
            f"Set model.trainer.init_args.expert to {size}, so that they hold whole experts, or tensor to 1."
        )


def _check_expert(config: Any, where: str, mesh: MeshSizes, expert: int) -> None:
    problem = f"model.trainer.init_args.expert is {expert}"
    if expert > 1 and not sparse_layers(config):
        raise ConfigError(f"{problem}, and {where} has no experts: set it to 1.")
    if expert > 1 and config.num_experts % expert:
        raise ConfigError(
            f"{problem}, which does not divide num_experts, {config.num_experts}, of {where}: give a divisor."
        )
    ranks = mesh.shard * mesh.tensor
    if ranks % expert:
        tensor = f", {mesh.shard} of the shard axis times {mesh.tensor} of the tensor axis" if mesh.tensor > 1 else ""
        raise ConfigError(
            f"{problem}, which does not divide the {ranks} ranks that hold a copy of the model{tensor}: give a "
            "divisor, or change trainer.devices."
        )


def build_decoder(
    config: Any, expert: int = 1, float8: Float8 = "none", is_compiled: bool = False
) -> tuple[nn.Module, Any]:
    """Return TorchTitan's decoder of a checked transformers configuration, on the meta device, and its adapter.

    The adapter names and reorders one weight at a time: it does not know of tied ends, of which it would want both.
    What it reorders may have one column, row numbers.

    Args:
        config: Configuration of transformers.
        expert: Ranks of expert parallelism.
        float8: Recipe of the linear layers of the blocks.
        is_compiled: Whether the blocks will be compiled.
    """
    family = FAMILIES[config.model_type]
    titan("distributed.utils").set_spmd_backend("partial_dtensor")
    package: Any = titan(f"models.{family.module}")
    decoder_config = convert_linears(_decoder_config(config, family, package), float8, is_compiled)
    set_sharding = getattr(titan(f"models.{family.module}.sharding"), f"set_{family.module}_sharding_config")
    set_sharding(decoder_config, enable_sp=True, **({"enable_ep": expert > 1} if family.name == "Qwen3" else {}))
    with torch.device("meta"):
        decoder: nn.Module = decoder_config.build()
    adapters: Any = titan(f"models.{family.module}.state_dict_adapter")
    adapter_class = getattr(adapters, f"{family.name}StateDictAdapter")
    return decoder, adapter_class(dataclasses.replace(decoder_config, enable_weight_tying=False, dim=1), None)


def _decoder_config(config: Any, family: Family, package: Any) -> Any:
    common: Any = titan("models.common")
    norm: Any = titan("models.common.nn_modules").RMSNorm
    normal = {"weight": partial(nn.init.normal_, std=config.initializer_range)}  # required, and never called
    decoder: Any = getattr(package, f"{family.name}Model")
    return decoder.Config(
        dim=config.hidden_size,
        vocab_size=config.vocab_size,
        enable_weight_tying=config.tie_word_embeddings,
        tok_embeddings=common.Embedding.Config(
            num_embeddings=config.vocab_size, embedding_dim=config.hidden_size, param_init=normal
        ),
        norm=norm.Config(normalized_shape=config.hidden_size, eps=config.rms_norm_eps),
        lm_head=common.Linear.Config(in_features=config.hidden_size, out_features=config.vocab_size, param_init=normal),
        layers=_layers(config, family, package, common),
    )


def _layers(config: Any, family: Family, package: Any, common: Any) -> list[Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters, is_llama = config.rope_parameters, family.name == "Llama3"
    rope_class = common.ComplexRoPE if is_llama else common.CosSinRoPE
    scaling: dict[str, Any] = {}
    if parameters["rope_type"] == "llama3":
        scaling = {
            "scaling": "llama",
            "scaling_factor": parameters["factor"],
            "low_freq_factor": parameters["low_freq_factor"],
            "high_freq_factor": parameters["high_freq_factor"],
            "original_max_position_embeddings": parameters["original_max_position_embeddings"],
        }
    rope = rope_class.Config(
        dim=head_dim, max_seq_len=config.max_position_embeddings, theta=parameters["rope_theta"], **scaling
    )
    attention = {
        "n_layers": config.num_hidden_layers,
        "dim": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "rope": rope,
        "fuse_qkv": False,  # its adapter would gather the queries, keys and values of all layers
        "attn_backend": "flex",  # replaced below
        **({} if is_llama else {"head_dim": head_dim}),
    }
    build = package._build_llama3_layers if is_llama else package._build_qwen3_layers
    layers: list[Any] = build(**attention, hidden_dim=config.intermediate_size)
    if sparse := sparse_layers(config):
        mixtures = _mixture_layers(config, package, attention)
        layers = [mixtures[index] if index in sparse else layer for index, layer in enumerate(layers)]
    for layer in layers:
        own = layer.attention
        own.head_dim, own.inner_attention = head_dim, packed_attention_config()
        for norm in (layer.attention_norm, layer.ffn_norm, own.qk_norm):
            if norm is not None:
                norm.eps = config.rms_norm_eps  # the builders fix it
    return layers


def _mixture_layers(config: Any, package: Any, attention: dict[str, Any]) -> list[Any]:
    layers: list[Any] = package._build_qwen3_moe_layers(
        **attention,
        moe_hidden_dim=config.moe_intermediate_size,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        moe_comm_backend="standard",  # all-to-all; within a rank without expert parallelism
    )
    for layer in layers:
        layer.moe.router.route_norm = config.norm_topk_prob
        use_own_parts(layer.moe)
    return layers
