"""FLOPs of an update, and its share of the GPUs' peak: model FLOPs utilisation (MFU, arXiv 2204.02311, appendix B)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np

from rlplug.models.shape import widths_of
from rlplug.types import Sample

TERA: Final = 1e12
PEAKS: Final = (
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bH200 NVL\b", 835.5),
    (r"\bG?H200\b", 989.5),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH100 PCIe\b", 756.0),
    (r"\b(H100|H800)\b", 989.5),
    (r"\bH20\b", 148.0),
    (r"\b(A100|A800)\b", 312.0),
    (r"\bA40\b", 149.7),
    (r"\bA30\b", 165.0),
    (r"\bA10\b", 125.0),
    (r"\bRTX A6000\b", 154.8),
    (r"\bL40S\b", 362.0),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
)
"""Peak of dense products in bfloat16 with sums in float32, in TFLOP/s, by the name that CUDA gives a GPU, of which the
first that fits counts. From NVIDIA's data sheets, halved where these count zeros ("with sparsity")."""


def peak_flops(name: str) -> float | None:
    """Return the peak of a GPU in bfloat16, in FLOP/s; ``None`` for one that is not in the table."""
    return next((peak * TERA for pattern, peak in PEAKS if re.search(pattern, name)), None)


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of the sequences that train; those of ranks add up."""

    tokens: float = 0.0
    trained: float = 0.0
    """Those whose logprobs train: of these alone the output layer computes logits."""
    pairs: float = 0.0
    """Sum of squares of the sequences' lengths."""
    prompt_tokens: float = 0.0
    prompt_pairs: float = 0.0
    """Sum of squares of the prompts' lengths."""

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> TokenCounts:
        """Count a rank's samples."""
        rows = [(len(s.token_ids), np.count_nonzero(s.response_mask), len(s.prompt.token_ids)) for s in samples]
        lengths, trained, prompts = np.array(rows, float).reshape(-1, 3).T
        return cls(*map(float, (lengths.sum(), trained.sum(), lengths @ lengths, prompts.sum(), prompts @ prompts)))

    def without_shared(self, share: float) -> TokenCounts:
        """Return the counts without the share of the tokens that was computed for another sequence: of prompts."""
        tokens = share * self.tokens
        of_prompts = min(tokens / self.prompt_tokens, 1.0) if self.prompt_tokens else 0.0
        pairs = self.pairs - of_prompts * self.prompt_pairs
        return TokenCounts(self.tokens - tokens, self.trained, pairs, self.prompt_tokens, self.prompt_pairs)

    def as_row(self) -> tuple[float, ...]:
        return astuple(self)


@dataclass(frozen=True)
class UpdateCost:
    """FLOPs of forward and backward passes of a model like Llama: gated MLPs, or the experts that a token visits.

    A forward pass takes two for each weight of a matrix and token, and ``2 n**2 H d`` in a layer's causal attention
    over n tokens, with H heads of d dimensions; the backward pass takes twice as many. What checkpointing computes
    again does not count, nor do windows or recurrences in place of attention.
    """

    block_weights: float
    """Weights of all blocks' matrices that a token visits."""
    head_weights: float
    attention: float
    """``H d`` of all layers with attention to the whole context."""
    is_frozen: bool
    """Whether adapters alone train: matrices have no gradients of their own then."""

    @classmethod
    def of(cls, config: Any, is_frozen: bool = False) -> UpdateCost:
        """Return the cost by the configuration of a text model."""
        query, key, mlp = widths_of(config)
        num_layers = config.num_hidden_layers
        types = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
        return cls(
            block_weights=num_layers * config.hidden_size * (2 * query + 2 * key + 3 * mlp),
            head_weights=config.hidden_size * config.vocab_size,
            attention=query * types.count("full_attention"),
            is_frozen=is_frozen,
        )

    def flops(self, counts: TokenCounts) -> float:
        """Return the FLOPs of one pass over sequences with so many tokens, forward and backward."""
        products = 2 * (counts.tokens * self.block_weights + counts.trained * self.head_weights)
        return (2 if self.is_frozen else 3) * products + 3 * 2 * self.attention * counts.pairs
