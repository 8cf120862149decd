"""Logprobs and entropies in less memory, for the LM head that materialises logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlplug.errors import ConfigError
from rlplug.interfaces import Effect, Optimization
from rlplug.models.lm_head import LMHeadOutput, LogprobRequest, TokenLogprobs, lm_head_of


@dataclass(frozen=True)
class ChunkedLogprobs:
    """Runs ``function`` on a chunk of logits at a time, and joins the results."""

    function: Callable[[Tensor, LogprobRequest], LMHeadOutput]
    """Computes logprobs and entropies from logits [K, V] of any float dtype."""
    chunk_size: int
    """Tokens of a chunk."""

    def __call__(self, logits: Tensor, request: LogprobRequest) -> LMHeadOutput:
        # the gradient of torch.split is one concatenation; that of each slice would be a [K, V] tensor of zeros
        chunks = zip(torch.split(logits, self.chunk_size), torch.split(request.targets, self.chunk_size), strict=True)
        outputs = [self.function(chunk, replace(request, targets=targets)) for chunk, targets in chunks]
        tokens = TokenLogprobs(
            torch.cat([output.tokens.logprobs for output in outputs]),
            torch.cat([output.tokens.sampled_logprobs for output in outputs]),
        )
        return LMHeadOutput(tokens, torch.cat([output.entropy for output in outputs]))


@dataclass(frozen=True)
class RecomputedEntropy:
    """Runs ``function``, and runs it again in the backward pass instead of keeping its intermediate tensors."""

    function: Callable[[Tensor], Tensor]
    """Computes entropies [K] from logits [K, V]."""

    def __call__(self, logits: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self._require_gradient(logits)
            return self.function(logits)
        entropies: Tensor = checkpoint(self.function, logits, use_reentrant=False, preserve_rng_state=False)
        return entropies

    @staticmethod
    def _require_gradient(logits: Tensor) -> None:
        if logits.requires_grad:  # the policy is being updated, and its entropy is only measured
            raise ConfigError(
                "EntropyCheckpointing has no effect: the algorithm's loss has no entropy term, so nothing is kept for "
                "its gradient. Remove it from model.optimizations, or set an entropy_coefficient."
            )


class EntropyChunking(Optimization):
    """Compute logprobs and entropies from logits for a chunk of tokens at a time, those under top-k and top-p included.

    Saves: in an update, more than half of the memory that logprobs and entropies of logits `[N, V]` take: the float32
    gradients, the softmax, its product with the logits, and the sort for top-p exist for one chunk. The float32 logits
    stay.
    Costs: next to nothing. Only for the path that materialises logits.
    Proof: the function of the model's LM head that computes logprobs from logits.

    verl's ``entropy_from_logits_with_chunking`` does this for entropies alone. That would not lower the peak of an
    update, which is in the backward pass of the logprobs. With an entropy that has gradients, the softmax of every
    chunk is kept for the backward pass: add EntropyCheckpointing.

    Args:
        chunk_size: Tokens whose logprobs are computed at a time.
    """

    applies_to = ("policy", "reference")
    conflicts: ClassVar[Mapping[str, str]] = {
        "FusedLogprobs": "FusedLogprobs computes entropies in chunks already",
    }

    def __init__(self, chunk_size: int = 2048) -> None:
        if chunk_size < 1:
            raise ConfigError(f"EntropyChunking.chunk_size is {chunk_size}: give at least 1; 2048 is usual.")
        self.chunk_size = chunk_size
        self._model: nn.Module = nn.Identity()

    def before_shard(self, model: nn.Module) -> None:
        self._model = model
        lm_head = lm_head_of(model)
        vars(lm_head)["from_logits"] = ChunkedLogprobs(lm_head.from_logits, self.chunk_size)

    def effects(self) -> list[Effect]:
        function = lm_head_of(self._model).from_logits
        if not isinstance(function, ChunkedLogprobs):
            return []
        return [Effect(f"logprobs computed from logits {function.chunk_size} tokens at a time")]


class EntropyCheckpointing(Optimization):
    """Recompute entropies in the backward pass, rather than keep the tensors that their gradient needs.

    Saves: between the passes, the softmax ``[N, V]`` in float32, which gradient checkpointing of the blocks does not
    cover. Add EntropyChunking, or the backward pass has a peak as high.
    Costs: the entropies once more. Only for the path that materialises logits, and an entropy that has gradients.
    Proof: the entropy function of the model's LM head.

    verl's ``entropy_checkpointing`` does this. A loss without entropy stops the run in its first update.
    """

    applies_to = ("policy",)
    conflicts: ClassVar[Mapping[str, str]] = {
        "FusedLogprobs": "FusedLogprobs recomputes what entropies need already",
    }

    def __init__(self) -> None:
        self._model: nn.Module = nn.Identity()

    def before_shard(self, model: nn.Module) -> None:
        self._model = model
        lm_head = lm_head_of(model)
        lm_head.entropy = RecomputedEntropy(lm_head.entropy)

    def effects(self) -> list[Effect]:
        is_set = isinstance(lm_head_of(self._model).entropy, RecomputedEntropy)
        return [Effect("entropies recomputed in the backward pass")] if is_set else []
