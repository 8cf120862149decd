"""Logprobs and entropies from hidden states, without the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlplug.errors import ConfigError
from rlplug.interfaces import ActivationTraits, Effect, Optimization
from rlplug.models.lm_head import LMHeadOutput, LogprobRequest, TokenLogprobs, lm_head_of
from rlplug_optims.chunk_scores import logits_gradient, score_chunk, truncated_logprobs
from rlplug_optims.compiler import stop_when_not_compiled


class FusedLogprobs(Optimization):
    """Go from hidden states to logprobs and entropies in chunks of tokens, and again in the backward pass.

    Saves: the logits ``[N, V]`` in the pass's dtype, their float32 copy and their gradients, mostly the largest tensors
    of an update; and passes over them.
    Costs: one more matrix product with the output layer's weight in the backward pass.
    Proof: the layer's scores come from the fused function.

    The idea is that of "Cut Your Losses in Large-Vocabulary Language Models", arXiv:2411.09009, and of Liger's fused
    linear cross-entropy, arXiv:2410.10989. Here the weight's gradient is summed in float32 over chunks, entropies have
    exact gradients, and logprobs under top-k and top-p come along.

    Args:
        chunk_size: Tokens whose logits exist at a time.
        compile: Fuse what follows the matrix product with ``torch.compile``; by default on CUDA only.
    """

    applies_to = ("policy", "reference")
    conflicts: ClassVar[Mapping[str, str]] = {
        "EntropyChunking": "FusedLogprobs computes entropies in chunks already",
        "EntropyCheckpointing": "FusedLogprobs recomputes what entropies need already",
    }

    def __init__(self, chunk_size: int = 4096, compile: bool | None = None) -> None:
        if chunk_size < 1:
            raise ConfigError(f"FusedLogprobs.chunk_size is {chunk_size}: give at least 1; 4096 is usual.")
        self.chunk_size = chunk_size
        self.compile = compile
        self._model: nn.Module | None = None

    def before_shard(self, model: nn.Module) -> None:
        self._model = model
        lm_head_of(model).fused = ChunkedOutputLayer(
            self.chunk_size, torch.cuda.is_available() if self.compile is None else self.compile
        )

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return replace(traits, logits_chunk=self.chunk_size)

    def effects(self) -> list[Effect]:
        layer = None if self._model is None else lm_head_of(self._model).fused
        if not isinstance(layer, ChunkedOutputLayer):
            return []
        how = "compiled" if layer.is_compiled else "not compiled"
        return [Effect(f"output layer fused with logprobs, {layer.chunk_size} tokens at a time, {how}")]


class ChunkedOutputLayer:
    """A ``FusedLMHead``: scores chunk by chunk.

    Args:
        chunk_size: Rows of a chunk.
        is_compiled: Whether its two elementwise functions are compiled. Chunks then have one size, so that batches of
            any number of tokens share what was compiled.
    """

    def __init__(self, chunk_size: int, is_compiled: bool) -> None:
        self.chunk_size = chunk_size
        self.is_compiled = is_compiled
        self.score: Callable[..., tuple[Tensor, ...]] = score_chunk
        self.gradient: Callable[..., Tensor] = logits_gradient
        if is_compiled:
            stop_when_not_compiled()
            self.score = torch.compile(score_chunk, dynamic=False)
            self.gradient = torch.compile(logits_gradient, dynamic=False)

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, request: LogprobRequest) -> LMHeadOutput:
        logprobs, entropies, sampled = _FusedScores.apply(hidden, weight, bias, request, self)  # type: ignore[no-untyped-call]
        tokens = TokenLogprobs(logprobs, sampled if request.needs_truncation else logprobs.detach())
        return LMHeadOutput(tokens, entropies)

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """Yield the rows of each chunk."""
        for start in range(0, num_rows, self.chunk_size):
            yield slice(start, min(start + self.chunk_size, num_rows))

    def filled(self, values: Tensor) -> Tensor:
        """Return [C] for a chunk's ``values``: filled up where chunks must have one size."""
        missing = self.chunk_size - len(values) if self.is_compiled else 0
        return nn.functional.pad(values, (0, missing))


@dataclass(frozen=True)
class _Logits:
    """Logits of a chunk, in a buffer that is filled again and again.

    Rows past the end of the last chunk hold numbers of no meaning; nothing that is computed from them is used.
    """

    weight: Tensor
    bias: Tensor | None
    buffer: Tensor

    @classmethod
    def of(cls, layer: ChunkedOutputLayer, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> _Logits:
        num_rows = layer.chunk_size if layer.is_compiled else min(layer.chunk_size, len(hidden))
        return cls(weight, bias, hidden.new_empty(num_rows, len(weight)))

    def fill(self, layer: ChunkedOutputLayer, hidden: Tensor) -> Tensor:
        """Return the logits of ``hidden`` [rows, D], with as many rows as ``layer`` works on."""
        rows = self.buffer[: len(hidden)]
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=rows)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=rows)
        return self.buffer if layer.is_compiled else rows


class _FusedScores(torch.autograd.Function):
    """Keeps hidden states, the weight and three numbers for each token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        request: LogprobRequest,
        layer: ChunkedOutputLayer,
    ) -> tuple[Tensor, Tensor, Tensor]:
        temperature = request.sampling.temperature or 1.0
        logits = _Logits.of(layer, hidden, weight, bias)
        scores = hidden.new_zeros(4, len(hidden), dtype=torch.float32)
        for rows in layer.chunks(len(hidden)):
            chunk = logits.fill(layer, hidden[rows])
            targets = request.targets[rows]
            found = layer.score(chunk, temperature, layer.filled(targets), request.entropy_mode != "none")
            for kept, values in zip(scores, found, strict=False):
                kept[rows] = values[: len(targets)]
            if request.needs_truncation:
                scores[3, rows] = truncated_logprobs(chunk[: len(targets)], targets, request.sampling)
        logprobs, lse, entropies, sampled = scores.unbind()
        ctx.layer, ctx.temperature = layer, temperature
        ctx.save_for_backward(hidden, weight, bias, request.targets, lse, entropies)
        ctx.mark_non_differentiable(sampled, *([entropies] if request.entropy_mode != "gradient" else []))
        ctx.set_materialize_grads(False)
        return logprobs, entropies, sampled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropies = ctx.saved_tensors
        layer: ChunkedOutputLayer = ctx.layer
        d_logprobs, d_entropies, _ = gradients
        kept = [targets, lse, torch.zeros_like(lse) if d_logprobs is None else d_logprobs]
        kept += [] if d_entropies is None else [entropies, d_entropies]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        logits = _Logits.of(layer, hidden, weight, bias)
        for rows in layer.chunks(len(hidden)):
            inputs = hidden[rows]
            found = [layer.filled(values[rows]) for values in kept]
            d_logits = layer.gradient(logits.fill(layer, inputs), ctx.temperature, *found)[: len(inputs)]
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[rows])
            if d_weight is not None:
                _add_product(d_weight, d_logits.t(), inputs)
            if d_bias is not None:
                d_bias += d_logits.sum(dim=0, dtype=torch.float32)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None if d_bias is None else d_bias.to(bias.dtype), None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to the float32 ``total``, without rounding the product to the factors' dtype."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())
