"""Tiny configurations of every model type that ``AutoModelForCausalLM`` builds, and of variants of them.

Sizes follow from the names of options, so that a model type of a later transformers is in the list too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from hybrid_models import COMMON, FAMILIES, VOCAB
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

SIZES: Final = (
    (r"(^|_)vocab_size$|^vocab_size_per_layer_input$|^n_vocab$", VOCAB),
    (r"moe.*intermediate_size|shared.*intermediate_size|expert_ffn_hidden_size|ffn_hidden_size_expert", 16),
    (r"intermediate_size|ffn_(hidden_size|dim)|^(n_inner|d_ff|dim_ff|ffn_config)$|feed_forward", 48),
    (r"hidden_size_per_layer_input", 8),
    (r"^(hidden_size|n_embd|d_model|embedding_size|emb_dim|hidden_dim|dim|lru_width|d_embed|word_embed_proj_dim)$", 32),
    (r"^(num_hidden_layers|num_layers|n_layers?|decoder_layers|encoder_layers|num_decoder_layers)$", 2),
    (r"(key_value_heads|kv_heads?|num_kv_heads)$|^multi_query_group_num$", 2),
    (r"^index_n_heads$", 16),  # no key's score is 0 of all, since equal scores would be chosen among by chance
    (r"attention_heads$|^(n_heads?|num_heads)$", 4),
    (r"experts_per_tok|^(moe_)?top_?k(_experts)?$|^num_selected_experts$|^moe_top_?k$|moe_k$", 2),
    (r"^(num|n)_.*experts$|^num_experts$|^moe_num_experts$", 4),
    (r"shared_experts$", 1),
    (r"^n_group$|^topk_group$|^num_expert_group$", 1),
    (r"qk_rope_head_dim", 4),
    (r"head_dim$|^(d_kv|v_head_dim|qk_nope_head_dim|head_size|kv_channels|attention_head_dim)$", 8),
    (r"lora_rank$|(^|_)rank$|low_?rank", 16),
    (r"window(_size)?$|attention_chunk_size|^index_topk$", 5),
    (r"chunk_size$|block_size$", 8),
    (r"(state_size|d_state)$", 16),
    (r"max_position_embeddings|^n_positions$|^n_ctx$|^max_sequence_length$|^max_seq_len$|^seq_length$", 256),
)
"""Values of integer options, by the first pattern that is in the name."""
COMPOSED: Final = ("text_config", "decoder", "decoder_config", "vision_config", "audio_config")
CHANGES: Final[dict[str, tuple[Any, ...]]] = {
    "tie_word_embeddings": (True, False),
    "attention_bias": (True,),
    "sliding_window": (5,),
    "use_sliding_window": (True,),
    "attn_logit_softcapping": (5.0,),
    "final_logit_softcapping": (5.0,),
    "router_jitter_noise": (0.1,),
    "input_jitter_noise": (0.1,),
    "attention_dropout": (0.5,),
    "partial_rotary_factor": (0.5,),
    "head_dim": (16,),
    "num_key_value_heads": (1, 4),
    "norm_topk_prob": (True, False),
    "mlp_bias": (True,),
    "use_qk_norm": (True, False),
    "first_k_dense_replace": (0,),
    "q_lora_rank": (None,),
    "num_hidden_layers": (5,),
    "hidden_act": ("gelu",),
    "is_decoder": (True,),
}
"""Options of which a variant has another value, where its configuration has the option."""
LAYERS: Final[dict[str, Any]] = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA4: Final[dict[str, Any]] = LAYERS | {"global_head_dim": 16, "head_dim": 8, "num_key_value_heads": 2}
OWN: Final[dict[str, dict[str, Any]]] = {
    "cohere_compass_text": LAYERS
    | {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None}},
    "codegen": {"rotary_dim": 4},
    "ctrl": {"dff": 48},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    | {"max_window_layers": 1},
    "dots3_note_text": {"num_attention_heads": 4, "num_key_value_heads": 4, "swa_num_attention_heads": 4}
    | {"swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 12}
    | {"swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "head_dim": 12},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": LAYERS["layer_types"] * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "laurel_rank": 4,
    },
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2},
    "reformer": {"is_decoder": True},
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zaya": {"router_hidden_size": 16},
}
"""Options of single model types, where the names of options do not say all."""


def families() -> list[str]:
    """Return the model types, in the alphabet's order."""
    return sorted({each.model_type for each in MODEL_FOR_CAUSAL_LM_MAPPING})


def tiny(family: str, **changes: Any) -> Any:
    """Return the tiny configuration of a model type, with options changed."""
    if family in FAMILIES:
        return AutoConfig.for_model(family, **COMMON | FAMILIES[family] | changes)
    return AutoConfig.for_model(family, **sizes_of(CONFIG_MAPPING[family]()) | OWN.get(family, {}) | changes)


def sizes_of(default: Any) -> dict[str, Any]:
    """Return what makes a default configuration tiny, its parts included."""
    options = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    aliases = type(default).attribute_map
    common = {name: value for name, value in COMMON.items() if aliases.get(name, name) in options}
    sizes = shrunk(options) | common
    heads, kv_heads = (
        options.get(aliases.get(f"num_{of}", f"num_{of}")) for of in ("attention_heads", "key_value_heads")
    )
    if heads is not None and heads == kv_heads:  # keys for each query, as in latent attention
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if "qk_rope_head_dim" in sizes:
        sizes |= {name: size for name, size in (("head_dim", 4), ("qk_head_dim", 12)) if name in options}
    for part in COMPOSED:
        inner = options.get(part)
        if inner is not None and not isinstance(inner, dict):
            sizes[part] = sizes_of(inner) | OWN.get(inner.model_type, {}) | {"model_type": inner.model_type}
    return with_layers(options, sizes)


def shrunk(options: dict[str, Any]) -> dict[str, Any]:
    """Return the integer options whose names say a size, small."""
    found = {}
    for name, value in options.items():
        size = next((size for pattern, size in SIZES if re.search(pattern, name)), None)
        if type(value) is int and size is not None and size < value:
            found[name] = size
    return found


def with_layers(options: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return sizes with as many layers as there are kinds of them, and lists of layers cut."""
    types = options.get("layer_types")
    if not types:
        return sizes
    kept = [types.index(kind) for kind in dict.fromkeys(types)]
    indices = list(range(1 + max(kept))) if max(kept) < 6 else kept
    indices += [index for index in range(len(types)) if index not in indices][: max(0, 2 - len(indices))]
    lists = {
        name: [value[index] for index in indices]
        for name, value in options.items()
        if isinstance(value, list) and len(value) == len(types)
    }
    return sizes | lists | {"num_hidden_layers": len(indices)}


def variants(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the changes of each variant of a configuration."""
    options = vars(config.get_text_config())
    for option, values in CHANGES.items():
        if option in options and not (option == "num_hidden_layers" and options.get("layer_types")):
            yield from ({option: value} for value in values if options[option] != value)
