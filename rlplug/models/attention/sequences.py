"""The sequences of a packed row as attention sees them, and what else may attend to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

LONG: Final = 4096
"""Smallest length of a lone sequence, in tokens, at which cuDNN's attention kernel is used."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of a packed row, and how each of them is attended to."""

    borders: Tensor
    """int32 [S + 1]: cumulative lengths"""
    longest: int
    """Tokens of the longest sequence."""
    scale: float | None = None
    """Factor of the query-key products; 1 / sqrt(head_dim) by default."""
    window: int | None = None
    """Number of keys that a query attends to, its own position included."""
    softcap: float | None = None
    """``c`` in ``c tanh(x / c)`` of the query-key products, as in Gemma 2 (arXiv 2408.00118, section 2)."""
    sinks: Tensor | None = None
    """[H]: logits of a key without a value that each query of a head also sees, as in gpt-oss."""


class SharedAttention(Protocol):
    """Attention over a packed row in which sequences share tokens."""

    def to(self, device: torch.device | str) -> SharedAttention:
        """Return a copy with all tensors on ``device``."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        """Return the attention of each token to those before it in its sequences.

        It is [H, N, head_dim] as ``query``, which has the whole row, whose ``borders`` the ``sequences`` have; ``key``
        and ``value`` are [H_kv, N, head_dim].
        """


FlashAttention: TypeAlias = Callable[[Tensor, Tensor, Tensor, Sequences], Tensor]
"""From [N, H, head_dim], and twice [N, H_kv, head_dim], in half precision on a GPU, to [N, H, head_dim]."""
