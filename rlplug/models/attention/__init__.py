"""Attention within the sequences of a packed row, registered with transformers under the name ``packed``.

On CUDA in half precision it is torch's variable-length flash attention, or cuDNN's for one long sequence; elsewhere
sequences are padded inside this one call. With sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509), ranks
exchange their parts of the row for heads of the whole row before attention, and back after it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface

from rlplug.errors import ConfigError
from rlplug.models.attention.sequences import FlashAttention, Sequences, SharedAttention

NAME: Final = "packed"
"""Value of ``attn_implementation`` that selects this attention."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sequence_group: dist.ProcessGroup | None = None,
    flash: FlashAttention | None = None,
    s_aux: Tensor | None = None,
    shared: SharedAttention | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention; the signature is that of transformers' attention functions.

    Args:
        query: [1, H, n, head_dim].
        key: [1, H_kv, n, head_dim]; H is a multiple of H_kv.
        value: [1, H_kv, n, head_dim].
        attention_mask: Ignored, since ``cu_seq_lens_q`` separates the sequences.
        scaling: Factor of the query-key products; 1 / sqrt(head_dim) by default.
        sliding_window: Number of keys that a query attends to, its own position included.
        softcap: ``c`` in ``c tanh(x / c)`` of the query-key products.
        cu_seq_lens_q: int32 [S + 1]: cumulative lengths of the sequences in the row of all ranks. Without them each row
            is one sequence.
        max_length_q: Tokens of the longest sequence.
        sequence_group: Process group of the ranks that hold the parts of the row.
        flash: Kernels that compute all attention; by default torch's, where they support the inputs.
        s_aux: [H]: attention sinks.
        shared: Attends in a row whose sequences share tokens, with kernels of its own.

    Returns:
        [1, n, H, head_dim], and None for attention weights.

    Raises:
        ConfigError: The layer is not causal, or ``flash`` does not support it.
    """
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"{type(module).__name__} is not causal, as packed attention is: use another model.")
    assert key.shape[2] == query.shape[2], "packed attention takes whole sequences, without a KV cache"
    batch_size, _, length, _ = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(batch_size + 1, device=query.device, dtype=torch.int32) * length
        max_length_q = length
    query, key, value = (states.transpose(0, 1).flatten(1, 2) for states in (query, key, value))
    if sequence_group is not None:
        from rlplug.distributed.sequence_parallel import heads_to_sequences, sequences_to_heads

        query, key, value = sequences_to_heads(query, key, value, sequence_group)
        s_aux = None if s_aux is None else s_aux.chunk(sequence_group.size())[sequence_group.rank()]
    window = None if sliding_window is None or sliding_window >= max_length_q else sliding_window
    sequences = Sequences(cu_seq_lens_q, max_length_q, scaling, window, softcap, s_aux)
    if shared is None:
        output = _attend(query, key, value, sequences, flash)
    else:
        output = shared.attend(query, key, value, sequences)
    if sequence_group is not None:
        output = heads_to_sequences(output, sequence_group)
    return output.view(-1, batch_size, length, output.shape[-1]).permute(1, 2, 0, 3), None


AttentionInterface.register(NAME, packed_attention)


def _attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, flash: FlashAttention | None) -> Tensor:
    """Return attention within sequences, with the kernels that were asked for or support it; [heads, N, head_dim]."""
    has_flash = sequences.sinks is None and uses_flash(query, value, sequences.softcap)
    if flash is not None and not has_flash:
        raise ConfigError(
            "the attention kernels of model.optimizations need passes in half precision on a GPU and scores without "
            "soft cap and sinks: remove them, or set model.policy.dtype to bfloat16."
        )
    if not has_flash:
        return _padded(query, key, value, sequences)
    from rlplug.models.attention.kernels import cudnn_attention, is_one_long_sequence, torch_flash_attention

    states = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
    if flash is None and is_one_long_sequence(query, sequences):
        return cudnn_attention(*states, sequences.scale).transpose(0, 1)
    return (flash or torch_flash_attention)(*states, sequences).transpose(0, 1)


def uses_flash(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Return whether torch's variable-length flash attention supports these inputs."""
    fits = query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and softcap is None and fits


def _padded(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Return attention of sequences padded to the longest; all tensors are [heads, N, head_dim], without padding."""
    borders, longest, scale, window = sequences.borders, sequences.longest, sequences.scale, sequences.window
    num_tokens = query.shape[1]
    steps = torch.arange(longest, device=query.device)
    positions = (borders[:-1, None] + steps).clamp(max=num_tokens - 1)  # [S, longest]; causality hides the padding
    query, key, value = (states[:, positions].transpose(0, 1) for states in (query, key, value))
    distance = steps[:, None] - steps
    seen = (distance >= 0) & (distance < (window or longest))
    if sequences.softcap is not None or sequences.sinks is not None:
        from rlplug.models.attention.products import attention_from_products

        output = attention_from_products(query, key, value, seen, sequences)
    else:
        mask: dict[str, Any] = {"is_causal": True} if window is None else {"attn_mask": seen}
        output = nn.functional.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True, **mask)
    tokens = torch.arange(num_tokens, device=query.device)
    # of all borders: compiled for a GPU, torch 2.11 searches a slice as if it began at 0 (pytorch#182343)
    sequence = torch.searchsorted(borders, tokens, right=True) - 1
    return output[sequence, :, tokens - borders[sequence]].transpose(0, 1)
