"""Folders with a mixture of experts and the tokenizer of another model."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from command_line import ROOT
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

QUICKSTART = ROOT / "examples" / "quickstart" / "model"


def make_experts_model(folder: Path, source: Path = QUICKSTART, **changes: Any) -> Path:
    """Write a Qwen3-MoE with the tokenizer of ``source``; two of four experts see each token, or as ``changes`` say."""
    shutil.copytree(source, folder)
    former = json.loads((source / "config.json").read_text())
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    same += ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    experts = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**{name: former[name] for name in same} | experts | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
