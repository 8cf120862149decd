"""What a trainer is checked on: model types on meshes, and the rows of tokens that every pass computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlplug.distributed.mesh import AXES
from rlplug.interfaces.trainer import ModelTrainer, TrainerClaims
from rlplug.models.hf_files import pretrained
from rlplug.token_arrays import as_tokens
from rlplug.types import MeshSizes, Prompt, Sample, SamplingParams, StepBatch
from rlplug_devkit.models import make_tokenizer
from rlplug_devkit.padded_rows import PaddedRows

VOCABULARY: Final = 51
"""Odd, so that no number of ranks divides the embeddings."""
PADDING: Final = 40
"""In the second half, which the second rank holds where ranks split the embeddings."""
SAMPLING: Final = SamplingParams(temperature=0.8)
LENGTHS: Final = [(3, 6), (2, 9), (5, 2), (1, 7), (4, 5), (1, 0), (2, 1), (6, 3)]
"""Tokens of prompt and completion of each row: 57 in all, so that an even number of ranks must fill the packed row."""
LONG_LENGTHS: Final = [(3, 5), (1, 511)]
"""The same of rows of which one is long."""
CHANGED_ROW: Final = 2
"""Row that has other tokens in ``rows(is_changed=True)``."""
LEARNING_RATE: Final = 0.01
MAX_NORM: Final = 1.0
"""Norm to which gradients are clipped; those of these models are larger."""

SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "attention_dropout": 0.1,
    "initializer_range": 0.2,
    "pad_token_id": PADDING,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_SCALED: Final = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_WINDOWS: Final[dict[str, Any]] = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 8,
}
_EXPERTS: Final[dict[str, Any]] = {
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
TINY_MODELS: Final[dict[str, PretrainedConfig]] = {
    "llama": LlamaConfig(**SIZES, rms_norm_eps=1e-3, tie_word_embeddings=False),
    "llama3": LlamaConfig(**SIZES, rms_norm_eps=1e-3, tie_word_embeddings=False, rope_parameters=_SCALED),
    "tied_llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, rms_norm_eps=1e-3, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**SIZES, **_WINDOWS, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **_EXPERTS, tie_word_embeddings=False),
}
"""Configurations by the names in ``TrainerConformance.models``; in two the epsilon of norms is not the default."""


@dataclass(frozen=True)
class Case:
    """A model on a mesh."""

    model: str
    folder: Path
    """Hugging Face folder of the model."""
    mesh: MeshSizes
    out: Path
    """Folder to which rank 0 writes ``results.pt``, and all ranks a checkpoint and an export."""


@dataclass(frozen=True)
class Job:
    """What the ranks of one start do: every case of their number, with one trainer."""

    trainer: ModelTrainer
    cases: tuple[Case, ...]


def meshes_of(claims: TrainerClaims) -> tuple[MeshSizes, ...]:
    """Return the meshes of one rank, and of two ranks on the shard axis and on each axis that a trainer claims."""
    axes = [axis for axis in AXES if axis == "shard" or axis in claims.axes]
    return MeshSizes(1, 1, 1, 1), *(MeshSizes(*(1 + (axis == other) for other in AXES)) for axis in axes)


def mesh_name(mesh: MeshSizes) -> str:
    """Return a name such as ``shard 2, tensor 2``."""
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 rank"


def write_model(config: PretrainedConfig, folder: Path) -> None:
    """Write configurations, float32 weights, always the same, and a tokenizer; no norm is trivial."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: Any = pretrained(AutoModelForCausalLM.from_config, config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.9)
    model.save_pretrained(folder)
    make_tokenizer(VOCABULARY).save_pretrained(folder)


def rows(is_changed: bool = False, lengths: Sequence[tuple[int, int]] = LENGTHS) -> PaddedRows:
    """Return right-padded rows [B, T] of prompts and completions; one of them is a single token, and trains nothing."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for row, (num_prompt, num_new) in enumerate(lengths):
        drawn = torch.randint(1, VOCABULARY, (num_prompt + num_new,), generator=generator)
        if num_new:
            drawn[num_prompt] = PADDING  # a token like others, whose embedding gets no gradient in transformers
        if is_changed and row == CHANGED_ROW:
            drawn = (drawn + 7) % VOCABULARY
        prompt, tokens = Prompt(str(row), tuple(drawn[:num_prompt].tolist()), ""), as_tokens(drawn.numpy(), np.int32)
        mask, logprobs = np.arange(len(tokens)) >= num_prompt, np.zeros(len(tokens), np.float32)
        samples.append(Sample(prompt, row, tokens, mask, logprobs, "", "stop", 0))
    return PaddedRows.of(StepBatch.from_samples(samples))


def loss_weights(shape: torch.Size) -> Tensor:
    """Return what the loss multiplies logprobs [B, T] with, float32, different for each token."""
    return torch.linspace(-1, 1, shape.numel()).view(shape)
