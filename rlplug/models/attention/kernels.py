"""Kernels of attention on GPUs that torch brings."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from rlplug.models.attention.sequences import LONG, Sequences

# torch 2.11 has grouped-query attention without this argument
GROUPED: Final[dict[str, Any]] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def torch_flash_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Return torch's variable-length flash attention."""
    output: Any = varlen_attn(
        query,
        key,
        value,
        cu_seq_q=sequences.borders,
        cu_seq_k=sequences.borders,
        max_q=sequences.longest,
        max_k=sequences.longest,
        scale=sequences.scale,
        window_size=(-1 if sequences.window is None else sequences.window - 1, 0),
        **GROUPED,
    )
    return output  # type: ignore[no-any-return]


def is_one_long_sequence(query: Tensor, sequences: Sequences) -> bool:
    """Return whether to use cuDNN's attention: for one long sequence, on Hopper or newer.

    It is then 1.6 times as fast as the variable-length kernel (``benchmarks/results/2026-11-21-update-on-h200``).
    """
    if sequences.window is not None or query.shape[-1] > 128:
        return False
    is_long = sequences.borders.shape[0] == 2 and query.shape[1] >= LONG
    return is_long and torch.cuda.get_device_capability() >= (9, 0)


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Return cuDNN's attention of one sequence; all tensors are [N, heads, head_dim]."""
    query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
    return output[0].transpose(0, 1)
