"""Compares the output layer's logprobs, entropies and gradients in bfloat16 with float64: plain, chunked, and fused.

    python benchmarks/logprob_accuracy.py --tokens 8192 --hidden 2048 --vocabulary 151936

Hidden states and weights are random bfloat16 numbers, the same for all; logits have a standard deviation of about 3.
float64 computes with them as they are, so that what is printed is the error of the computation alone. Errors of
logprobs and entropies are in nats; those of gradients are relative, in the 2-norm. Needs a GPU for the compiled kernels
that a run has; on a CPU nothing is compiled.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from rlplug_optims.entropy_memory import ChunkedLogprobs
from rlplug_optims.fused_logprobs import ChunkedLMHead
from torch import Tensor

from rlplug.models.lm_head import LMHead, LMHeadOutput, LogprobRequest
from rlplug.types import SamplingParams

Layer = Callable[[Tensor, Tensor, LogprobRequest], LMHeadOutput]


def plain(hidden: Tensor, weight: Tensor, request: LogprobRequest) -> LMHeadOutput:
    """Materialise logits in the inputs' dtype, as a run without optimizations does."""
    return LMHead().from_logits(hidden @ weight.t(), request)


def chunked(hidden: Tensor, weight: Tensor, request: LogprobRequest) -> LMHeadOutput:
    """Materialise logits, and score 2048 tokens at a time, as ``EntropyChunking`` does."""
    return ChunkedLogprobs(LMHead().from_logits, 2048)(hidden @ weight.t(), request)


def fused(is_compiled: bool) -> Layer:
    """Return the layer of ``FusedLogprobs``."""
    head = ChunkedLMHead(4096, is_compiled)
    return lambda hidden, weight, request: head(hidden, weight, None, request)


def in_float64(
    hidden: Tensor, weight: Tensor, targets: Tensor, factors: tuple[Tensor, Tensor], chunk: int
) -> dict[str, Tensor]:
    """Return logprobs, entropies and the loss's gradients by their formulas, ``chunk`` tokens at a time.

    ``d logprob / dz = onehot - p`` and ``d H / dz = -p (log p + H)``, with ``p = softmax(z)``.
    """
    weight = weight.double()
    found: dict[str, list[Tensor]] = {"logprobs": [], "entropies": [], "hidden": []}
    d_weight = torch.zeros_like(weight)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        inputs = hidden[rows].double()
        log_p = (inputs @ weight.t()).log_softmax(dim=-1)
        p = log_p.exp()
        entropies = -(p * log_p).sum(dim=-1)
        d_logits = -p * (log_p + entropies[:, None]) * factors[1][rows, None] - p * factors[0][rows, None]
        d_logits.scatter_add_(1, targets[rows, None], factors[0][rows, None])
        found["logprobs"].append(log_p.gather(1, targets[rows, None])[:, 0])
        found["entropies"].append(entropies)
        found["hidden"].append(d_logits @ weight)
        d_weight += d_logits.t() @ inputs
    return {name: torch.cat(parts) for name, parts in found.items()} | {"weight": d_weight}


def errors(
    layer: Layer, leaves: list[Tensor], targets: Tensor, factors: Any, exact: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the errors of one layer."""
    inputs = [leaf.clone().requires_grad_() for leaf in leaves]
    output = layer(inputs[0], inputs[1], LogprobRequest(targets, SamplingParams(), "gradient"))
    loss = (output.tokens.logprobs * factors[0].float()).sum() + (output.entropy * factors[1].float()).sum()
    d_hidden, d_weight = torch.autograd.grad(loss, inputs)
    row: dict[str, Any] = {}
    for name, values in (("logprobs", output.tokens.logprobs), ("entropies", output.entropy)):
        difference = (values.detach().double() - exact[name]).abs()
        row |= {f"{name} mean": float(difference.mean()), f"{name} max": float(difference.max())}
    for name, gradient in (("hidden", d_hidden), ("weight", d_weight)):
        row[f"d {name}"] = float((gradient.double() - exact[name]).norm() / exact[name].norm())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens at a time in float64")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    hidden = normal(options.tokens, options.hidden).bfloat16()
    weight = (normal(options.vocabulary, options.hidden) * 3 / options.hidden**0.5).bfloat16()
    targets = torch.randint(options.vocabulary, (options.tokens,), generator=generator, device=device)
    factors = normal(options.tokens).double(), normal(options.tokens).double()
    exact = in_float64(hidden, weight, targets, factors, options.chunk)
    layers = {"plain": plain, "EntropyChunking": chunked, "FusedLogprobs": fused(is_compiled=device.type == "cuda")}
    for name, layer in layers.items():
        row = errors(layer, [hidden, weight], targets, factors, exact)
        print(json.dumps({"layer": name, **{key: float(f"{value:.3g}") for key, value in row.items()}}), flush=True)


if __name__ == "__main__":
    main()
