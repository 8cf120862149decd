"""Tiny models and a batch, and what transformers alone says of them: one sequence at a time, unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from rlplug.models.critic import ValueHead
from rlplug.types import Batch, Prompt, Sample, SamplingParams

VOCABULARY, PADDING = 51, 40
"""With two ranks on the tensor axis, the second holds the padding token's embedding."""
SAMPLING = SamplingParams(temperature=0.8)
HEAD_SEED = 3
"""Seed of a critic's value head."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": PADDING,
    "eos_token_id": 1,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, rms_norm_eps=1e-3, tie_word_embeddings=False, rope_parameters=SCALED),
    "tied llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, rms_norm_eps=1e-3, tie_word_embeddings=True),
}
"""Norms have an epsilon that TorchTitan's builders do not, and Llama's heads permuted rows of queries and keys."""
LENGTHS = [(3, 6), (2, 9), (5, 2), (1, 7), (4, 5)]
"""Tokens of prompt and completion of each row."""


def make_folder(family: str, folder: Path) -> Path:
    """Write configuration and float32 weights, always the same; no norm is trivial."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: Any = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for row, (num_prompt, num_new) in enumerate(LENGTHS):
        drawn = torch.randint(1, VOCABULARY, (num_prompt + num_new,), generator=generator)
        drawn[num_prompt] = PADDING  # a token like others, whose embedding gets no gradient in transformers
        tokens = tuple(drawn.tolist())
        prompt = Prompt(uid=str(row), token_ids=tokens[:num_prompt], text="")
        mask = (False,) * num_prompt + (True,) * num_new
        samples.append(Sample(prompt, row, tokens, mask, (0.0,) * len(tokens), "", "stop", 0))
    return Batch.from_samples(samples, 0)


def weights_of_tokens(like: torch.Tensor) -> torch.Tensor:
    """Return what the loss multiplies logprobs and entropies with, different for each token."""
    return torch.linspace(-1, 1, like.numel()).view_as(like)


def transformers_results(folder: Path) -> dict[str, Any]:
    """Return logprobs and entropies [B, T], gradients and weights by checkpoint name, of a loss over all tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rows = batch()
    logprobs, entropy = torch.zeros(rows.input_ids.shape), torch.zeros(rows.input_ids.shape)
    for row, ids in enumerate(rows.input_ids):
        length = int(rows.attention_mask[row].sum())
        scores = (model(ids[None, :length]).logits[0, :-1] / SAMPLING.temperature).log_softmax(-1)
        trained = rows.response_mask[row, 1:length]
        logprobs[row, 1:length] = scores.gather(-1, ids[1:length, None])[:, 0] * trained
        entropy[row, 1:length] = -(scores.exp() * scores).sum(-1) * trained
    (weights_of_tokens(logprobs) * (logprobs + 0.3 * entropy)).sum().backward()
    named = dict(model.named_parameters())
    return critic_results(model, rows) | {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "gradients": {name: parameter.grad for name, parameter in named.items()},
        "weights": {name: parameter.detach() for name, parameter in named.items()},
    }


def critic_results(model: Any, rows: Batch) -> dict[str, Any]:
    """Return a critic's values [B, T], and the gradients of a loss over them by the trunk's names and the head's."""
    head, values = ValueHead(model.config.hidden_size, HEAD_SEED), torch.zeros(rows.input_ids.shape)
    for row, ids in enumerate(rows.input_ids):
        length = int(rows.attention_mask[row].sum())
        hidden = model.base_model(ids[None, : length - 1]).last_hidden_state[0]
        values[row, 1:length] = head(hidden) * rows.response_mask[row, 1:length]
    named = dict(model.base_model.named_parameters(prefix="model")) | dict(head.named_parameters(prefix="head"))
    gradients = torch.autograd.grad((weights_of_tokens(values) * values).sum(), list(named.values()))
    return {"values": values.detach(), "value gradients": dict(zip(named, gradients, strict=True))}
