"""FLOPs of an update, and its share of the GPUs' peak: model FLOPs utilisation (MFU, arXiv 2204.02311, appendix B)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np
from torch import nn
from transformers.pytorch_utils import Conv1D

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.models.shape import widths_of
from rlplug.types import Sample

TERA: Final = 1e12
DELTA_CHUNK: Final = 64
"""Tokens that delta rules compute at once, in flash-linear-attention and in transformers."""
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
    """FLOPs of forward and backward passes of a model of transformers.

    A forward pass takes two for each weight of a matrix or convolution and token, of experts those that a token visits;
    ``2 n**2 H d`` in a layer's causal attention over n tokens, with H heads of d dimensions; and in a layer with a
    state what its rule takes for a token. The backward pass takes twice as many. What checkpointing computes again does
    not count, nor do windows.
    """

    block_weights: float
    """Weights of all matrices that a token visits, without the output layer."""
    head_weights: float
    attention: float
    """``H d`` of all layers with attention to the whole context."""
    rules: float
    """FLOPs of a token's forward pass in the rules of all delta nets and Mamba 2 layers, by chunks."""
    is_frozen: bool
    """Whether adapters alone train: matrices have no gradients of their own then."""

    @classmethod
    def of(cls, network: Any, is_frozen: bool = False) -> UpdateCost:
        """Return the cost of a model by its modules; it may be on the meta device."""
        config, output_layer = network.config.get_text_config(), network.get_output_embeddings()
        blocks = transformer_blocks(network)
        inside = {module for block in blocks for module in block.modules()}
        layers = [module for block in blocks for module in block.modules()]  # a block that layers share, for each
        layers += [module for module in network.modules() if module not in inside and module is not output_layer]
        return cls(
            block_weights=sum(visited_weights(module, config) for module in layers),
            head_weights=config.hidden_size * config.vocab_size,
            attention=sum(attention_width(module, config) for module in layers),
            rules=sum(rule_flops(module) for module in layers),
            is_frozen=is_frozen,
        )

    def flops(self, counts: TokenCounts) -> float:
        """Return the FLOPs of one pass over sequences with so many tokens, forward and backward."""
        products = 2 * (counts.tokens * self.block_weights + counts.trained * self.head_weights)
        mixing = 2 * self.attention * counts.pairs + self.rules * counts.tokens
        return (2 if self.is_frozen else 3) * products + 3 * mixing


def visited_weights(module: Any, config: Any) -> float:
    """Return the weights of a module's own matrices and convolutions that a token is multiplied with."""
    if isinstance(module, nn.Embedding):
        return 0.0
    matrices = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]
    if any(isinstance(module, each) for each in (nn.Linear, Conv1D, nn.Conv1d)):
        return float(sum(map(nn.Parameter.numel, matrices)))
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((count for name in names if (count := getattr(config, name, None))), 0)
    visited = (getattr(config, "num_experts_per_tok", None) or 1) / max(num_experts, 1)
    sizes = [each.numel() * (visited if each.dim() == 3 and len(each) == num_experts else 1) for each in matrices]
    return float(sum(sizes))


def attention_width(module: Any, config: Any) -> float:
    """Return ``H d`` of a module that attends to the whole context, and 0 of all others."""
    if not hasattr(module, "is_causal") or not module.is_causal or getattr(module, "sliding_window", None):
        return 0.0
    if getattr(module, "layer_type", "full_attention") == "sliding_attention":
        return 0.0
    if (output := getattr(module, "o_proj", None)) is None or not hasattr(output, "in_features"):
        return float(widths_of(config).query)
    if (width := getattr(module, "qk_head_dim", None)) is None:
        return float(output.in_features)
    return float(config.num_attention_heads * width + output.in_features) / 2  # latent attention: two widths


def rule_flops(module: Any) -> float:
    """Return the FLOPs of a token in the rule of a gated delta net or of Mamba 2, computed by chunks as kernels do.

    With H heads, keys of k and values of v dimensions, and chunks of C tokens, a delta rule takes
    ``H (6 k v + C (4 k + 2 v))`` beside the solve in a chunk; Mamba 2 with an inner width I, states of N dimensions and
    G groups takes ``4 I N + 2 C (I + G N)``.
    """
    if hasattr(module, "head_k_dim") and hasattr(module, "num_v_heads"):
        key, value = module.head_k_dim, module.head_v_dim
        return float(module.num_v_heads * (6 * key * value + DELTA_CHUNK * (4 * key + 2 * value)))
    if hasattr(module, "ssm_state_size") and hasattr(module, "chunk_size"):
        inner, state = module.num_heads * module.head_dim, module.ssm_state_size
        return float(4 * inner * state + 2 * module.chunk_size * (inner + module.n_groups * state))
    return 0.0
