"""Entropies of logits in less memory, for the path that materialises logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlplug.errors import ConfigError
from rlplug.interfaces import Effect, Optimization
from rlplug.scoring import scorer_of


@dataclass(frozen=True)
class MemorySavingEntropy:
    """Computes what ``function`` does, [K] from logits [K, V], chunk by chunk and with recomputation.

    Both can be switched on, in any order: recomputation always goes into the chunks.
    """

    function: Callable[[Tensor], Tensor]
    chunk_size: int | None = None
    recomputes: bool = False

    def __call__(self, logits: Tensor) -> Tensor:
        # split's gradient is one concatenation; that of slices would be a [K, V] of zeros for each
        chunks = [logits] if self.chunk_size is None else torch.split(logits, self.chunk_size)
        return torch.cat([self._entropy(chunk) for chunk in chunks])

    def _entropy(self, logits: Tensor) -> Tensor:
        if not self.recomputes or not torch.is_grad_enabled():
            return self.function(logits)
        entropies: Tensor = checkpoint(self.function, logits, use_reentrant=False, preserve_rng_state=False)
        return entropies


class _EntropyMemory(Optimization):
    """What both switches share."""

    applies_to = ("policy",)

    def __init__(self) -> None:
        self._model: nn.Module = nn.Identity()

    def _edit(self, model: nn.Module, **changes: Any) -> None:
        self._model = model
        scorer = scorer_of(model)
        current = scorer.entropy
        saving = current if isinstance(current, MemorySavingEntropy) else MemorySavingEntropy(current)
        scorer.entropy = dataclasses.replace(saving, **changes)


class EntropyChunking(_EntropyMemory):
    """Compute entropies for a chunk of tokens at a time.

    Saves: in the forward pass, the softmax ``[N, V]`` and its product with the logits.
    Costs: next to nothing. Only for the path that materialises logits.
    Proof: the entropy function of the model's scorer.

    verl's ``entropy_from_logits_with_chunking`` does this. With gradients, the softmax of every chunk is kept for the
    backward pass: add EntropyCheckpointing.

    Args:
        chunk_size: Tokens whose softmax exists at a time.
    """

    conflicts: ClassVar[Mapping[str, str]] = {
        "FusedLogprobs": "FusedLogprobs computes entropies in chunks already",
    }

    def __init__(self, chunk_size: int = 2048) -> None:
        if chunk_size < 1:
            raise ConfigError(f"EntropyChunking.chunk_size is {chunk_size}: give at least 1; 2048 is usual.")
        super().__init__()
        self.chunk_size = chunk_size

    def before_shard(self, model: nn.Module) -> None:
        self._edit(model, chunk_size=self.chunk_size)

    def effects(self) -> list[Effect]:
        function = scorer_of(self._model).entropy
        if not isinstance(function, MemorySavingEntropy) or function.chunk_size is None:
            return []
        return [Effect(f"entropies computed {function.chunk_size} tokens at a time")]


class EntropyCheckpointing(_EntropyMemory):
    """Compute entropies again in the backward pass, rather than keep what they need.

    Saves: between the passes, the softmax ``[N, V]`` in float32, which gradient checkpointing of the blocks does not
    cover.
    Costs: the entropies once more. Only for the path that materialises logits, and an entropy that has gradients.
    Proof: the entropy function of the model's scorer.

    verl's ``entropy_checkpointing`` does this.
    """

    conflicts: ClassVar[Mapping[str, str]] = {
        "FusedLogprobs": "FusedLogprobs recomputes what entropies need already",
    }

    def before_shard(self, model: nn.Module) -> None:
        self._edit(model, recomputes=True)

    def effects(self) -> list[Effect]:
        function = scorer_of(self._model).entropy
        is_set = isinstance(function, MemorySavingEntropy) and function.recomputes
        return [Effect("entropies recomputed in the backward pass")] if is_set else []
