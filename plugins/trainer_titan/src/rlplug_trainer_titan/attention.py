"""Attention of packed rows for TorchTitan's models: the core's, which its transformers models use too."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from rlplug.models.attention import packed_attention
from rlplug_trainer_titan.library import titan


class PackedSequences(NamedTuple):
    """Lengths of the sequences in a packed row; it travels through TorchTitan's models as ``attention_masks``."""

    cu_seq_lens_q: Tensor
    """int32 [S + 1]: cumulative lengths of the sequences"""
    max_length_q: int
    """Tokens of the longest sequence."""


def packed_attention_config() -> Any:
    """Return the configuration of an inner attention, in the place of TorchTitan's flex attention.

    TorchTitan's own have no backward pass on CPUs (flex attention), or compute in bf16 alone (varlen attention).
    """
    return _packed_attention_class().Config()


@functools.cache
def _packed_attention_class() -> Any:
    """Return the module's class, always the same one, because blocks of other classes would each be compiled."""
    module: Any = titan("protocols.module").Module

    class PackedAttention(module):  # type: ignore[misc]  # its base class is imported at run time
        """Attention within each sequence of a packed row, over this rank's heads."""

        @dataclass(kw_only=True, slots=True)
        class Config(module.Config):  # type: ignore[misc]
            """No options."""

        def __init__(self, config: Any) -> None:
            super().__init__()

        def forward(
            self,
            q_BLNH: Tensor,  # noqa: N803 - TorchTitan shards the arguments by these names
            k_BLNH: Tensor,  # noqa: N803
            v_BLNH: Tensor,  # noqa: N803
            *,
            attention_masks: PackedSequences,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            """Return [1, n, heads, head_dim] of queries [1, n, heads, head_dim] and keys and values of fewer heads."""
            query, key, value = (states.transpose(1, 2) for states in (q_BLNH, k_BLNH, v_BLNH))
            output, _ = packed_attention(self, query, key, value, None, scaling=scale, **attention_masks._asdict())
            return output

    return PackedAttention
