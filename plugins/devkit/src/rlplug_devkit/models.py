"""Model folders for the checks: a Llama, a Qwen2 with tied embeddings, two mixtures of experts, and two for FP8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlplug.models.hf_files import pretrained

Family: TypeAlias = Literal["llama", "qwen2", "experts", "routed", "fp8", "fp8_experts", "adapters", "stopping"]
PLAIN: Final[tuple[Family, ...]] = ("llama", "qwen2", "stopping")
"""Families whose matrices need not divide into blocks."""

VOCABULARY = 64
MAX_CONTEXT = 2048
NUM_EXPERTS = 4
PAD, BOS, ENDS = 0, 2, (1, 7)
"""Token ids of the tiny models; ``generation_config.json`` has both end tokens, and the tokenizer only the first."""

HOSTILE_GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 3,
    "repetition_penalty": 5.0,
    "max_new_tokens": 2,
    "min_new_tokens": 2,
    "suppress_tokens": [8, 9, 10, 11],
    "num_beams": 2,
    "eos_token_id": list(ENDS),
    "pad_token_id": PAD,
    "bos_token_id": BOS,
}
"""Generation settings of the folders, as checkpoints have for chats; only the end tokens may affect a rollout."""


def make_model_folder(family: Family, folder: Path) -> None:
    """Write configuration, float32 weights and a tokenizer, always the same.

    Heads have 64 dimensions and the hidden size is 128, as attention kernels need. Weights are large enough for
    distributions that are far from uniform, and no norm or bias is trivial. ``fp8`` is a Qwen3 whose matrices divide
    into blocks of 128, also where engines fuse them, with another scale in each block. ``experts`` and ``fp8_experts``
    are such a Qwen3-MoE whose tokens visit all experts, so that round-off cannot route a token elsewhere. In ``routed``
    two of eight experts see each token, and the second of four layers has none. ``adapters`` is the Qwen3 of ``fp8``,
    and ``stopping`` the ``llama``.
    """
    config = _config(family)
    has_blocks = family not in PLAIN
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = pretrained(AutoModelForCausalLM.from_config, config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=1.5)
            elif parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
            elif has_blocks:
                rows, columns = parameter.shape[-2:]
                sizes = torch.rand([*parameter.shape[:-2], -(-rows // 128), -(-columns // 128)]) * 1.4 + 0.3
                sizes = sizes**2 if parameter.dim() > 2 else sizes
                parameter.data *= sizes.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :rows, :columns]
        if has_blocks:
            model.lm_head.weight.data *= 4  # so that the distribution is still far from uniform
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(HOSTILE_GENERATION_CONFIG))
    make_tokenizer(VOCABULARY - 5).save_pretrained(folder)


def _config(family: Family) -> PretrainedConfig:
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_CONTEXT,
        "initializer_range": 0.15,
        "bos_token_id": BOS,
        "eos_token_id": ENDS[0],
        "pad_token_id": PAD,
    }
    if family not in PLAIN:
        common |= {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
        common |= {"initializer_range": 0.04}  # soft attention keeps round-off of activations small
    if family == "qwen2":
        return Qwen2Config(**common, tie_word_embeddings=True)
    if family in PLAIN:
        return LlamaConfig(**common, head_dim=64, tie_word_embeddings=False)
    common |= {"head_dim": 64}
    if family in ("fp8", "adapters"):
        return Qwen3Config(**common, tie_word_embeddings=False)
    if family == "routed":
        routed = {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts": 8, "num_experts_per_tok": 2}
        return Qwen3MoeConfig(**common | routed, moe_intermediate_size=64, norm_topk_prob=True)
    common |= {"moe_intermediate_size": 256}
    common |= {"num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_EXPERTS}
    return Qwen3MoeConfig(**common, norm_topk_prob=True, tie_word_embeddings=False)


def make_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character and a BOS, which reveals an engine that tokenises text itself.

    Models may embed more ids than the tokenizer has, as most do.
    """
    characters = [chr(ord("A") + index) for index in range(num_tokens - 3)]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<bos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte of UTF-8, which knows every text, and a template of what is said."""
    vocabulary = {token: index for index, token in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<eos>", eos_token="<eos>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made
