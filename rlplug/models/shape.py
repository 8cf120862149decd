"""Widths of a model's blocks, and the cost of its attention, from its configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PretrainedConfig


class Widths(NamedTuple):
    """Widths of a transformer block, in elements per token."""

    query: int
    """Width of the queries: heads times head size; 0 without attention."""
    key: int
    """Width of the keys, and of the values."""
    mlp: int
    """Inner width of the MLP, or of all experts that a token visits."""


def widths_of(config: Any) -> Widths:
    """Return the widths of a block from the configuration of a text model."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]

    def size(option: str) -> Any:
        values: list[Any] = [getattr(layer, option, None) or 0 for layer in layers]
        return max(max(each) if isinstance(each, list | tuple) else each for each in values)  # a list in Gemma 3n

    hidden, num_heads = config.hidden_size, size("num_attention_heads")
    head_dim = max(size("head_dim"), size("global_head_dim")) or hidden // max(num_heads, 1)  # Gemma 4 has both
    num_kv_heads = size("num_key_value_heads") or num_heads
    mlp = size("moe_intermediate_size") or size("intermediate_size") or 4 * hidden
    mlp *= size("num_experts_per_tok") or 1
    return Widths(num_heads * head_dim, num_kv_heads * head_dim, mlp)


def attention_cost(config: PretrainedConfig) -> float:
    """Return the cost of attention to one token of context, relative to the cost of a token in a block's matrices.

    A forward pass over n tokens takes ``2 P n`` FLOPs in matrices with P parameters, and ``2 L H d n**2`` in the causal
    attention of L layers with H heads of d dimensions: n / 2 keys a query on average, two products, two FLOPs each. The
    share is ``L H d / P``; the backward pass takes about twice as much of both. Layers with a window or a recurrence
    count in P alone. It is an estimate, used only to balance the load of ranks. Without attention it is 0.
    """
    query, key, mlp = widths_of(config)
    if not query:
        return 0.0
    block = config.hidden_size * (2 * query + 2 * key + 3 * mlp)
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    return float(layer_types.count("full_attention") / len(layer_types) * query / block)
