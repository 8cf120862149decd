"""Tiny models and batches, and what plain torch says of them: one sequence at a time, all logits, no optimisation."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from rlplug_devkit.padded_rows import PaddedRows
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from rlplug.models import attention
from rlplug.models.forward import PolicyOutput, policy_forward
from rlplug.models.packing import pack
from rlplug.types import Prompt, Sample, SamplingParams, StepBatch

VOCABULARY = 48
SAMPLING = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
}
LENGTHS = [(3, 6), (2, 9), (5, 1), (1, 7)]
"""Tokens of prompt and completion of each row."""


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float32, packed: bool = True) -> nn.Module:
    """Return the same model every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = copy.deepcopy(CONFIGS[family])  # a model keeps it, with its attention
        config._attn_implementation = attention.NAME if packed else "eager"
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(dtype)


def wide_model() -> nn.Module:
    """Return two layers whose weights are large enough for 8-bit state, which smaller ones do not get."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))


def tiny_batch(lengths: list[tuple[int, int]] = LENGTHS, seed: int = 0) -> PaddedRows:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for row, (num_prompt, num_new) in enumerate(lengths):
        tokens = tuple(torch.randint(1, VOCABULARY, (num_prompt + num_new,), generator=generator).tolist())
        samples.append(
            Sample(
                prompt=Prompt(uid=str(row), token_ids=tokens[:num_prompt], text=""),
                group=0,
                token_ids=tokens,
                response_mask=(False,) * num_prompt + (True,) * num_new,
                rollout_logprobs=(0.0,) * len(tokens),
                completion="",
                finish_reason="stop",
                policy_version=0,
                reward=0.0,
            )
        )
    return PaddedRows.of(StepBatch.from_samples(samples))


@dataclass(frozen=True)
class Results:
    """A loss and its gradients, by parameter."""

    loss: Tensor
    gradients: dict[str, Tensor]


def weighted(logprobs: Tensor, entropies: Tensor) -> Tensor:
    """Return a loss [] of [B, T] that tells positions apart, and logprobs from entropies."""
    places = torch.arange(logprobs.numel(), dtype=torch.float32).view(logprobs.shape)
    return (logprobs * places.cos()).sum() + 0.5 * (entropies * places.sin()).sum()


def optimized_results(model: nn.Module, batch: PaddedRows) -> Results:
    """Return what the product computes."""
    device = next(model.parameters()).device
    output: PolicyOutput = policy_forward(model, pack(batch.flat()).to(device), SAMPLING, "gradient")
    loss = weighted(batch.grid(output.tokens.logprobs.cpu()), batch.grid(output.entropy.cpu()))
    model.zero_grad()
    loss.backward()
    return Results(loss.detach(), gradients(model))


def plain_results(model: nn.Module, batch: PaddedRows) -> Results:
    """Return what plain torch computes of an unsharded model with eager attention."""
    logprobs, entropies = torch.zeros(2, *batch.input_ids.shape)
    rows = []
    for row, length in enumerate(batch.lengths):
        ids = batch.input_ids[row : row + 1, :length]
        logits = model(ids, use_cache=False).logits[0, :-1].float() / SAMPLING.temperature
        distribution = torch.distributions.Categorical(logits=logits)
        filling = torch.zeros(batch.input_ids.shape[1] - length)
        of_row = (distribution.log_prob(ids[0, 1:]), distribution.entropy())
        rows.append([torch.cat([torch.zeros(1), values, filling]) for values in of_row])
    logprobs, entropies = (torch.stack(column) * batch.response_mask for column in zip(*rows, strict=True))
    loss = weighted(logprobs, entropies)
    model.zero_grad()
    loss.backward()
    return Results(loss.detach(), gradients(model))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def set_gradients(model: nn.Module, step: int) -> None:
    """Give parameters, sharded or not, the same random gradients every time."""
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + index)
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def assert_same(actual: Results, expected: Results, rtol: float = 1e-5) -> None:
    """Compare; a parameter's gradient may be off by ``rtol`` of its largest element."""
    torch.testing.assert_close(actual.loss, expected.loss, rtol=rtol, atol=0)
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        atol = rtol * float(gradient.abs().max())
        torch.testing.assert_close(actual.gradients[name], gradient, rtol=rtol, atol=atol, msg=f"gradient of {name}")
