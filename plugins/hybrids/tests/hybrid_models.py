"""Tiny random models of many families, by transformers' model type: hybrids, and others with what attention has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from rlplug.models import attention

VOCAB: Final = 32
COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
DELTA: Final[dict[str, Any]] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
MAMBA2: Final[dict[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
    "num_hidden_layers": 3,
}
CONVOLUTIONS: Final[dict[str, Any]] = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
WINDOWS: Final[dict[str, Any]] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

HYBRIDS: Final[dict[str, dict[str, Any]]] = {
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "olmo_hybrid": DELTA | {"linear_num_key_heads": 4},
    "kimi_linear": EXPERTS
    | LATENT
    | {"num_hidden_layers": 4, "linear_num_heads": 4, "linear_head_dim": 8, "layer_types": DELTA["layer_types"]},
    "nemotron_h": {
        "layer_types": ["mamba", "moe", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "falcon_h1": MAMBA2,
    "granitemoehybrid": MAMBA2
    | EXPERTS
    | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 16}
    | {"position_embedding_type": "rope"},
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "lfm2": CONVOLUTIONS | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONVOLUTIONS | EXPERTS | {"num_dense_layers": 1},
    "lfm3": CONVOLUTIONS,
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 128},
    "zamba2": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "mamba_d_state": 16,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    "minimax": EXPERTS
    | {"num_hidden_layers": 3, "block_size": 8, "layer_types": ["linear_attention", "full_attention"] * 2}
    | {"num_hidden_layers": 4},
    "bailing_hybrid": EXPERTS
    | LATENT
    | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"first_k_dense_replace": 1},
    "qwen4_exp_text": DELTA
    | EXPERTS
    | {"linear_num_key_heads": 4, "hc_count": 2, "hc_lowrank": 4, "ple_layer_ids": [1], "ple_embed_dim": 32}
    | {"heads_per_ngram": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 1}
    | {"make_ngram_vocab_size_divisible_by": 1, "layer_types": ["linear_attention"] * 4},
    "inkling_text": {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
}
"""Options of families that have layers with a state."""
OTHERS: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": WINDOWS | {"query_pre_attn_scalar": 8},
    "gemma3_text": WINDOWS | {"query_pre_attn_scalar": 8},
    "gpt_oss": WINDOWS | EXPERTS,
    "qwen3_moe": EXPERTS,
    "deepseek_v3": LATENT
    | {"head_dim": 4}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
}
"""Options of families without: dense, tied, windows, soft caps, sinks, mixtures of experts, latent attention."""
FAMILIES: Final = HYBRIDS | OTHERS
REFUSED: Final = {
    "inkling_text": ("of it alone", "its attention adds a bias to scores, which packed attention does not know"),
    "mamba2": ("leaks", "the model drops `cu_seq_lens_q`, so that no layer can know the borders"),
    "qwen4_exp_text": (
        "NGramEmbedding",
        "sizes of its n-gram tables are buffers, which the check at start cannot know",
    ),
}
"""Families that are refused: a part of the message, and the reason."""


HAS_WRAPPERS: Final = hasattr(transformers.integrations, "use_kernel_func_from_hub_with_fallback")
"""Whether transformers wraps functions so that their kernels are found; with 5.8.1 rows of such layers are padded."""


def config_of(family: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model."""
    return AutoConfig.for_model(family, **COMMON | FAMILIES[family] | changes)


def build(family: str, seed: int = 0) -> Any:
    """Return a tiny random model with weights large enough that a leak shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation=attention.NAME, dtype=torch.float32)
    enlarge(model)
    return model.eval()


def enlarge(model: Any) -> None:
    """Draw larger weights than the family's own, so that a leak shows, and none that all are equal, as biases of 0."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim > 1 and "A_log" not in name:
            torch.nn.init.normal_(parameter, std=0.5 / parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 0.2)


def write(family: str, folder: Path) -> Path:
    """Write the configuration of a tiny model without weights, as a folder from which a run draws them."""
    config_of(family).save_pretrained(folder)
    return folder
