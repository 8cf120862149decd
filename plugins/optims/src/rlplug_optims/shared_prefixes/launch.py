"""Runs the kernels of tree attention.

Shape legend:
    H     heads of queries
    G     heads of keys and values; H is a multiple
    N     tokens of the row
    D     width of a head
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor

from rlplug_optims.shared_prefixes import kernels
from rlplug_optims.shared_prefixes.tree_attention import BLOCK, Blocks, How

MUCH: Final = 150 << 10
"""Bytes of shared memory that the larger tiles may need."""


class Tiles(NamedTuple):
    """What a program computes at a time, in tokens that divide a block of the lists, and how."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def tiles(kernel: str, query: Tensor) -> Tiles:
    """Return the fastest of nine tried on an H100 for heads of 64 and 128; others are small enough to be loaded.

    They depend on nothing else, so that a run computes the same again.
    """
    width = query.shape[-1]
    if query.dtype == torch.float32:
        return Tiles(32, 32, 4, 1) if width <= 128 else Tiles(16, 16, 4, 1)
    if width > 128 or (width > 64 and shared_memory(query.device) < MUCH):
        return Tiles(64, 32, 4, 2)
    if kernel == "forward":
        return Tiles(128, 64, 4, 3) if width <= 64 else Tiles(64, 64, 4, 3)
    if kernel == "query gradients":
        return Tiles(64, 64, 4, 3) if width <= 64 else Tiles(64, 64, 4, 2)
    return Tiles(128, 64, 4, 2) if width <= 64 else Tiles(64, 128, 8, 2)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes that a program can have on a GPU; where kernels are interpreted, any number will do."""
    if device.type != "cuda":
        return MUCH
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, blocks: Blocks, how: How
) -> tuple[Tensor, Tensor]:
    """Return attention, and the logarithm of each query's sum of exponentials, to the base 2.

    Args:
        query: [H, N, D], in any order of heads and tokens, as all tensors here.
        key: [G, N, D].
        value: [G, N, D].
        sinks: [H]: logits of a key without a value that all queries see.
        blocks: What is seen.
        how: Scale, window and soft cap.

    Returns:
        [H, N, D] and float32 [H, N].
    """
    num_heads, num_tokens, _ = query.shape
    output = _empty(query)
    lse = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=query.device)
    constants = _constants("forward", query, key, how)
    kernels.forward[triton.cdiv(num_tokens, constants["QUERIES"]), num_heads](
        *(query, key, value, output, lse, sinks, blocks.ends, blocks.positions, blocks.keys, blocks.num_keys),
        *(len(blocks.keys), num_tokens, how.scale, how.softcap),
        *(stride for each in (query, key, value, output) for stride in each.stride()[:2]),
        **constants,
        SINKS=sinks is not None,
    )
    return output, lse


def backward(
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    blocks: Blocks,
    how: How,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, and the products [H, N] of outputs and their gradients.

    Args:
        d_output: [H, N, D].
        query: As for :func:`forward`, and so are ``key``, ``value``, ``blocks`` and ``how``.
        key: [G, N, D].
        value: [G, N, D].
        output: Of :func:`forward`, and so is ``lse``.
        lse: float32 [H, N].
        blocks: What is seen.
        how: Scale, window and soft cap.
    """
    num_heads, num_tokens, _ = query.shape
    delta = torch.empty_like(lse)
    constants = _constants("query gradients", query, key, how)
    kernels.delta[triton.cdiv(num_tokens, BLOCK), num_heads](
        *(output, d_output, delta, num_tokens, *output.stride()[:2], *d_output.stride()[:2]),
        WIDTH=constants["WIDTH"],
        PADDED=constants["PADDED"],
        TOKENS=BLOCK,
    )
    read = (query, key, value, d_output, lse, delta, blocks.ends, blocks.positions)
    numbers = (len(blocks.keys), num_tokens, how.scale, how.softcap)
    strides = [stride for each in (query, key, value, d_output) for stride in each.stride()[:2]]
    d_query, d_key, d_value = (_empty(each) for each in (query, key, value))
    kernels.query_gradients[triton.cdiv(num_tokens, constants["QUERIES"]), num_heads](
        *(*read, d_query, blocks.keys, blocks.num_keys, *numbers, *strides, *d_query.stride()[:2]), **constants
    )
    constants = _constants("key gradients", query, key, how)
    kernels.key_gradients[triton.cdiv(num_tokens, constants["KEYS"]), len(key)](
        *(*read, d_key, d_value, blocks.queries, blocks.num_queries, *numbers, *strides),
        *(*d_key.stride()[:2], *d_value.stride()[:2]),
        **constants,
    )
    return d_query, d_key, d_value, delta


def _empty(tensor: Tensor) -> Tensor:
    """Return an empty tensor [H, N, D], whose memory is [N, H, D], as a model's layers have it."""
    num_heads, num_tokens, width = tensor.shape
    return tensor.new_empty(num_tokens, num_heads, width).transpose(0, 1)


def _constants(kernel: str, query: Tensor, key: Tensor, how: How) -> dict[str, Any]:
    width, of = query.shape[-1], tiles(kernel, query)
    return {
        "GROUP": len(query) // len(key),
        "WINDOW": how.window,
        "SOFTCAP": how.softcap > 0,
        "WIDTH": width,
        "PADDED": max(16, triton.next_power_of_2(width)),
        "QUERIES": of.queries,
        "KEYS": of.keys,
        "BLOCK": BLOCK,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": of.num_warps,
        "num_stages": of.num_stages,
    }
