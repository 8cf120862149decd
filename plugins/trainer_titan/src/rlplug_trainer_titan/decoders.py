"""TorchTitan's decoders of Hugging Face configurations, which its own builders know by names of flavours alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from rlplug.errors import ConfigError
from rlplug_trainer_titan.attention import packed_attention_config
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
}
"""Families by transformers' ``model_type``."""
OFF: Final = ("attention_bias", "mlp_bias", "use_sliding_window")
"""Options of transformers' configurations that TorchTitan's models of these families do not have."""


def check_config(config: Any, key: str, path: str, tensor_size: int) -> None:
    """Refuse a model that TorchTitan has not, or would compute in another way.

    Args:
        config: Configuration of transformers.
        key: Key of the model in the run's configuration, for messages.
        path: Folder of the model, for messages.
        tensor_size: Ranks of the tensor axis.

    Raises:
        ConfigError: The message names the option of the model and the fix.
    """
    where, instead = f"{key}.path {path!r}", "Remove model.trainer to train it with transformers."
    family = FAMILIES.get(config.model_type)
    if family is None:
        experts = " Mixtures of experts are not supported yet." if "moe" in config.model_type else ""
        raise ConfigError(
            f"{where}: TorchTitan trains models of type {' and '.join(FAMILIES)} here, and this is "
            f"{config.model_type!r}.{experts} {instead}"
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
    for option in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size"):
        if getattr(config, option) % tensor_size:
            raise ConfigError(
                f"trainer.strategy.init_args.tensor is {tensor_size}, which does not divide {option}, "
                f"{getattr(config, option)}, of {where}: give a divisor."
            )


def build_decoder(config: Any, float8: Float8 = "none", is_compiled: bool = False) -> tuple[nn.Module, Any]:
    """Return TorchTitan's decoder of a checked transformers configuration, on the meta device, and its adapter.

    The adapter converts one weight at a time: it does not know of tied ends, of which it would want both.

    Args:
        config: Configuration of transformers.
        float8: Recipe of the linear layers of the blocks.
        is_compiled: Whether the blocks will be compiled.
    """
    family = FAMILIES[config.model_type]
    titan("distributed.utils").set_spmd_backend("partial_dtensor")
    package: Any = titan(f"models.{family.module}")
    decoder_config = convert_linears(_decoder_config(config, family, package), float8, is_compiled)
    set_sharding = getattr(titan(f"models.{family.module}.sharding"), f"set_{family.module}_sharding_config")
    set_sharding(decoder_config, enable_sp=True, **({"enable_ep": False} if family.name == "Qwen3" else {}))
    with torch.device("meta"):
        decoder: nn.Module = decoder_config.build()
    adapters: Any = titan(f"models.{family.module}.state_dict_adapter")
    adapter_class = getattr(adapters, f"{family.name}StateDictAdapter")
    return decoder, adapter_class(dataclasses.replace(decoder_config, enable_weight_tying=False), None)


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
    build = package._build_llama3_layers if is_llama else package._build_qwen3_layers
    layers: list[Any] = build(
        n_layers=config.num_hidden_layers,
        dim=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        hidden_dim=config.intermediate_size,
        rope=rope,
        fuse_qkv=False,  # its adapter would gather the queries, keys and values of all layers
        attn_backend="flex",  # replaced below
        **({} if is_llama else {"head_dim": head_dim}),
    )
    for layer in layers:
        attention = layer.attention
        attention.head_dim, attention.inner_attention = head_dim, packed_attention_config()
        norms = [layer.attention_norm, layer.ffn_norm, attention.qk_norm]
        for norm in norms:
            if norm is not None:
                norm.eps = config.rms_norm_eps  # the builders fix it
    return layers
