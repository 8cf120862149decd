"""Fused LM head: logprobs and entropies from hidden states, without the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlplug.errors import ConfigError
from rlplug.interfaces import ActivationTraits, Effect, Optimization
from rlplug.models.lm_head import LMHeadOutput, LogprobRequest, TokenLogprobs, lm_head_of
from rlplug_optims.chunk_logprobs import chunk_logprobs, logits_gradient, truncated_logprobs
from rlplug_optims.compiler import stop_when_not_compiled


class FusedLogprobs(Optimization):
    """Compute logprobs and entropies from hidden states in chunks of tokens, and again in the backward pass.

    Saves: the logits ``[N, V]`` in the pass's dtype, their float32 copy and their gradients, mostly the largest tensors
    of an update; and passes over them.
    Costs: one more matrix product with the output layer's weight in the backward pass, unless ``recompute`` is false.
    Proof: the fused function that takes the place of the output layer.

    The idea is that of "Cut Your Losses in Large-Vocabulary Language Models", arXiv:2411.09009, and of Liger's fused
    linear cross-entropy, arXiv:2410.10989. Here the weight's gradient is summed in float32 over chunks, entropies have
    exact gradients, and logprobs under top-k and top-p are computed too.

    Args:
        chunk_size: Tokens whose logits exist at a time.
        compile: Fuse the operations after the matrix product with ``torch.compile``; by default on CUDA only.
        recompute: Compute the logits of a chunk again in the backward pass. ``false`` keeps the logits ``[N, V]`` of a
            micro-batch in the pass's dtype instead, and saves the matrix product.
    """

    applies_to = ("policy", "reference")
    conflicts: ClassVar[Mapping[str, str]] = {
        "EntropyChunking": "FusedLogprobs computes entropies in chunks already",
        "EntropyCheckpointing": "FusedLogprobs recomputes what entropies need already",
    }

    def __init__(self, chunk_size: int = 4096, compile: bool | None = None, recompute: bool = True) -> None:
        if chunk_size < 1:
            raise ConfigError(f"FusedLogprobs.chunk_size is {chunk_size}: give at least 1; 4096 is usual.")
        self.chunk_size = chunk_size
        self.compile = compile
        self.recompute = recompute
        self._model: nn.Module | None = None

    def before_shard(self, model: nn.Module) -> None:
        self._model = model
        lm_head_of(model).fused = ChunkedLMHead(
            self.chunk_size, torch.cuda.is_available() if self.compile is None else self.compile, self.recompute
        )

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return replace(traits, logits_chunk=self.chunk_size, keeps_logits=not self.recompute)

    def effects(self) -> list[Effect]:
        head = None if self._model is None else lm_head_of(self._model).fused
        if not isinstance(head, ChunkedLMHead):
            return []
        how = "compiled" if head.is_compiled else "not compiled"
        kept = "" if head.recomputes else ", logits kept for the backward pass"
        return [Effect(f"output layer fused with logprobs, {head.chunk_size} tokens at a time, {how}{kept}")]


class ChunkedLMHead:
    """``FusedLMHead`` that works on a chunk of tokens at a time.

    Args:
        chunk_size: Tokens of a chunk.
        is_compiled: Whether its two elementwise functions are compiled. All chunks then have one size, so that batches
            of any number of tokens share the compiled code.
        recomputes: Whether the backward pass computes logits again, rather than keep all of them.
    """

    def __init__(self, chunk_size: int, is_compiled: bool, recomputes: bool = True) -> None:
        self.chunk_size = chunk_size
        self.is_compiled = is_compiled
        self.recomputes = recomputes
        self.logprobs: Callable[..., tuple[Tensor, ...]] = chunk_logprobs
        self.gradient: Callable[..., Tensor] = logits_gradient
        if is_compiled:
            stop_when_not_compiled()
            self.logprobs = torch.compile(chunk_logprobs, dynamic=False)
            self.gradient = torch.compile(logits_gradient, dynamic=False)

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, request: LogprobRequest) -> LMHeadOutput:
        keeps_all = not self.recomputes and torch.is_grad_enabled()
        inputs = (hidden, weight, bias, request, self, keeps_all)
        logprobs, entropies, sampled = _FusedLogprobs.apply(*inputs)  # type: ignore[no-untyped-call]
        tokens = TokenLogprobs(logprobs, sampled if request.needs_truncation else logprobs.detach())
        return LMHeadOutput(tokens, entropies)

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """Yield the slice of the tokens that each chunk takes."""
        for start in range(0, num_tokens, self.chunk_size):
            yield slice(start, min(start + self.chunk_size, num_tokens))

    def padded(self, values: Tensor) -> Tensor:
        """Return a chunk's ``values`` as [C], padded with zeros where all chunks must have one size."""
        missing = self.chunk_size - len(values) if self.is_compiled else 0
        return nn.functional.pad(values, (0, missing))


@dataclass(frozen=True)
class _Logits:
    """Memory for logits: of one chunk after another, or of all.

    Rows past the end of the last chunk hold stale numbers; nothing that is computed from them is used.
    """

    weight: Tensor
    """[V, D]"""
    bias: Tensor | None
    """[V]"""
    memory: Tensor
    """[chunks, C, V], in the pass's dtype; where there is one chunk, all take turns in it"""

    @classmethod
    def of(
        cls, head: ChunkedLMHead, hidden: Tensor, weight: Tensor, bias: Tensor | None, keeps_all: bool = False
    ) -> _Logits:
        size = head.chunk_size if head.is_compiled else min(head.chunk_size, max(len(hidden), 1))
        num_chunks = -(-len(hidden) // size) if keeps_all else 1
        return cls(weight, bias, hidden.new_empty(num_chunks, size, len(weight)))

    def compute(self, hidden: Tensor, tokens: slice) -> None:
        """Compute the logits of a chunk: of the ``tokens`` of ``hidden`` [N, D]."""
        inputs = hidden[tokens]
        logits = self._place(tokens)[: len(inputs)]
        if self.bias is None:
            torch.mm(inputs, self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, inputs, self.weight.t(), out=logits)

    def chunk(self, head: ChunkedLMHead, tokens: slice) -> Tensor:
        """Return the computed logits of a chunk: [C, V] where all chunks have one size, else [c, V]."""
        return self._place(tokens)[: head.chunk_size if head.is_compiled else tokens.stop - tokens.start]

    def _place(self, tokens: slice) -> Tensor:
        return self.memory[tokens.start // self.memory.shape[1] % len(self.memory)]


class _FusedLogprobs(torch.autograd.Function):
    """Fused LM head that keeps only hidden states, weights and three numbers a token for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        request: LogprobRequest,
        head: ChunkedLMHead,
        keeps_all: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        temperature = request.sampling.temperature or 1.0
        logits = _Logits.of(head, hidden, weight, bias, keeps_all)
        results = hidden.new_zeros(4, len(hidden), dtype=torch.float32)
        for tokens in head.chunks(len(hidden)):
            logits.compute(hidden, tokens)
            chunk = logits.chunk(head, tokens)
            targets = request.targets[tokens]
            computed = head.logprobs(chunk, temperature, head.padded(targets), request.entropy_mode != "none")
            for result, values in zip(results, computed, strict=False):
                result[tokens] = values[: len(targets)]
            if request.needs_truncation:
                results[3, tokens] = truncated_logprobs(chunk[: len(targets)], targets, request.sampling)
        logprobs, lse, entropies, sampled = results.unbind()
        ctx.head, ctx.temperature = head, temperature
        kept = logits.memory if keeps_all else None
        ctx.save_for_backward(hidden, weight, bias, request.targets, lse, entropies, kept)
        ctx.mark_non_differentiable(sampled, *([entropies] if request.entropy_mode != "gradient" else []))
        ctx.set_materialize_grads(False)
        return logprobs, entropies, sampled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropies, kept = ctx.saved_tensors
        head: ChunkedLMHead = ctx.head
        d_logprobs, d_entropies, _ = gradients
        per_token = [targets, lse, torch.zeros_like(lse) if d_logprobs is None else d_logprobs]
        per_token += [] if d_entropies is None else [entropies, d_entropies]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        logits = _Logits.of(head, hidden, weight, bias) if kept is None else _Logits(weight, bias, kept)
        for tokens in head.chunks(len(hidden)):
            inputs = hidden[tokens]
            arguments = [head.padded(values[tokens]) for values in per_token]
            if kept is None:
                logits.compute(hidden, tokens)
            d_logits = head.gradient(logits.chunk(head, tokens), ctx.temperature, *arguments)[: len(inputs)]
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[tokens])
            if d_weight is not None:
                _add_product(d_weight, d_logits.t(), inputs)
            if d_bias is not None:
                d_bias += d_logits.sum(dim=0, dtype=torch.float32)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None if d_bias is None else d_bias.to(bias.dtype), None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to the float32 ``total``, without rounding the product to the factors' dtype."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())
