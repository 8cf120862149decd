"""Tiny models and a batch, and what transformers alone says of them: one sequence at a time, unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rlplug_devkit.padded_rows import PaddedRows
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from rlplug.models.critic.network import ValueHead
from rlplug.types import Prompt, Sample, SamplingParams, StepBatch
from rlplug.weight_sync.hf_names import hf_weights

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
EXPERTS = SIZES | {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
"""Experts of three layers: all but the middle one, or the middle one alone."""
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, rms_norm_eps=1e-3, tie_word_embeddings=False, rope_parameters=SCALED),
    "tied llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, rms_norm_eps=1e-3, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**EXPERTS, rms_norm_eps=1e-3, norm_topk_prob=True, mlp_only_layers=[1]),
    "tied qwen3_moe": Qwen3MoeConfig(**EXPERTS, tie_word_embeddings=True, norm_topk_prob=False, decoder_sparse_step=2),
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


def batch() -> PaddedRows:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for row, (num_prompt, num_new) in enumerate(LENGTHS):
        drawn = torch.randint(1, VOCABULARY, (num_prompt + num_new,), generator=generator)
        drawn[num_prompt] = PADDING  # a token like others, whose embedding gets no gradient in transformers
        tokens = tuple(drawn.tolist())
        prompt = Prompt(uid=str(row), token_ids=tokens[:num_prompt], text="")
        mask = (False,) * num_prompt + (True,) * num_new
        samples.append(Sample(prompt, row, tokens, mask, (0.0,) * len(tokens), "", "stop", 0))
    return PaddedRows.of(StepBatch.from_samples(samples))


def weights_of_tokens(like: torch.Tensor) -> torch.Tensor:
    """Return what the loss multiplies logprobs and entropies with, different for each token."""
    return torch.linspace(-1, 1, like.numel()).view_as(like)


def given_experts(input_ids: Tensor, positions: Tensor, num_layers: int) -> Tensor:
    """Return experts int64 [n, L, 3] for tokens [n], different for each token and layer, and none for every third."""
    experts = (input_ids + positions)[:, None, None] + torch.arange(num_layers)[:, None] + torch.tensor([0, 3, 6])
    return (experts % 8).masked_fill((positions % 3 == 2)[:, None, None], -1)


def use_given_experts(model: Any, input_ids: Tensor) -> None:
    """Let the routers of a transformers model use :func:`given_experts` for the sequence ``input_ids`` [n]."""
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    given = given_experts(input_ids, torch.arange(len(input_ids)), len(routers))
    for router, experts in zip(routers, given.unbind(1), strict=True):

        def replace(_: Any, __: Any, output: tuple[Tensor, ...], experts: Tensor = experts) -> tuple[Tensor, ...]:
            logits, own_scores, own = output
            scores = logits.softmax(-1).gather(-1, experts.clamp(min=0))
            is_given = experts[:, :1] >= 0
            scores = torch.where(is_given, scores / scores.sum(-1, keepdim=True), own_scores)
            return logits, scores, torch.where(is_given, experts, own)

        router._forward_hooks.clear()
        router.register_forward_hook(replace)


def transformers_results(folder: Path, is_given: bool = False) -> dict[str, Any]:
    """Return logprobs and entropies [B, T], gradients and weights by checkpoint name, of a loss over all tokens.

    With ``is_given``, routers use :func:`given_experts`.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rows = batch()
    logprobs, entropy = torch.zeros(rows.input_ids.shape), torch.zeros(rows.input_ids.shape)
    for row, ids in enumerate(rows.input_ids):
        length = int(rows.attention_mask[row].sum())
        if is_given:
            use_given_experts(model, ids[:length])
        scores = (model(ids[None, :length]).logits[0, :-1] / SAMPLING.temperature).log_softmax(-1)
        trained = rows.response_mask[row, 1:length]
        logprobs[row, 1:length] = scores.gather(-1, ids[1:length, None])[:, 0] * trained
        entropy[row, 1:length] = -(scores.exp() * scores).sum(-1) * trained
    (weights_of_tokens(logprobs) * (logprobs + 0.3 * entropy)).sum().backward()
    weights = hf_weights(model)
    named = [(weight, p) for name, p in model.named_parameters() for weight in weights[name]]
    return ({} if is_given else critic_results(model, rows)) | {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "gradients": {weight.name: weight.of(parameter.grad) for weight, parameter in named},
        "weights": {weight.name: weight.of(parameter.detach()) for weight, parameter in named},
    }


def critic_results(model: Any, rows: PaddedRows) -> dict[str, Any]:
    """Return a critic's values [B, T], and the gradients of a loss over them by the trunk's names and the head's."""
    head, values = ValueHead(model.config.hidden_size, HEAD_SEED), torch.zeros(rows.input_ids.shape)
    for row, ids in enumerate(rows.input_ids):
        length = int(rows.attention_mask[row].sum())
        hidden = model.base_model(ids[None, : length - 1]).last_hidden_state[0]
        values[row, 1:length] = head(hidden) * rows.response_mask[row, 1:length]
    named = dict(model.base_model.named_parameters(prefix="model")) | dict(head.named_parameters(prefix="head"))
    gradients = torch.autograd.grad((weights_of_tokens(values) * values).sum(), list(named.values()))
    weights, found = hf_weights(model), dict[str, Tensor]()
    for name, gradient in zip(named, gradients, strict=True):
        found |= {weight.name: weight.of(gradient) for weight in weights[name]} if name in weights else {name: gradient}
    return {"values": values.detach(), "value gradients": found}
