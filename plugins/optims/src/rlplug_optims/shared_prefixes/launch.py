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
from rlplug_optims.shared_prefixes.tile_lists import Mask, newest_lists

MUCH: Final = 150 << 10
"""Bytes of shared memory that the larger tiles may need."""

DELTAS: Final = 128
"""Tokens whose products of output and gradient a program computes."""


class Tiles(NamedTuple):
    """What a program computes at a time, in tokens, and how."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def tiles(kernel: str, query: Tensor) -> Tiles:
    """Return the fastest of six to nine tried on an H100 for heads of 64 and 128; others are small enough to load.

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
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Mask, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return attention, and the logarithm of each query's sum of exponentials, to the base 2.

    Args:
        query: [H, N, D], in any order of heads and tokens, as all tensors here.
        key: [G, N, D].
        value: [G, N, D].
        sinks: [H]: logits of a key without a value that all queries see.
        mask: What is seen.
        scale: Factor of the products.
        softcap: ``c`` in ``c tanh(x / c)``; 0 for none.

    Returns:
        [H, N, D] and float32 [H, N].
    """
    num_heads, num_tokens, _ = query.shape
    output = _empty(query)
    lse = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=query.device)
    constants = _constants("forward", query, key, mask, softcap)
    lists = newest_lists(mask, constants["QUERIES"], constants["KEYS"], by_key=False)
    kernels.forward[len(lists.tiles), num_heads](
        *(query, key, value, output, lse, sinks, mask.ends, mask.positions, *lists),
        *(lists.tiles.shape[1], num_tokens, scale, softcap, *_strides(query, key, value, output)),
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
    mask: Mask,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, and the product [H, N] of each output and its gradient.

    Args:
        d_output: [H, N, D].
        query: As for :func:`forward`, and so are ``key``, ``value``, ``mask``, ``scale`` and ``softcap``.
        key: [G, N, D].
        value: [G, N, D].
        output: Of :func:`forward`, and so is ``lse``.
        lse: float32 [H, N].
        mask: What is seen.
        scale: Factor of the products.
        softcap: 0 for none.
    """
    num_tokens, delta = query.shape[1], torch.empty_like(lse)
    d_query, d_key, d_value = (_empty(each) for each in (query, key, value))
    constants = _constants("query gradients", query, key, mask, softcap)
    kernels.delta[triton.cdiv(num_tokens, DELTAS), len(query)](
        *(output, d_output, delta, num_tokens, *_strides(output, d_output)),
        WIDTH=constants["WIDTH"],
        PADDED=constants["PADDED"],
        TOKENS=DELTAS,
    )
    lists = newest_lists(mask, constants["QUERIES"], constants["KEYS"], by_key=False)
    kernels.query_gradients[len(lists.tiles), len(query)](
        *(query, key, value, d_output, lse, delta, mask.ends, mask.positions, d_query, *lists),
        *(lists.tiles.shape[1], num_tokens, scale, softcap, *_strides(query, key, value, d_output, d_query)),
        **constants,
    )
    constants = _constants("key gradients", query, key, mask, softcap)
    lists = newest_lists(mask, constants["QUERIES"], constants["KEYS"], by_key=True)
    kernels.key_gradients[len(lists.tiles), len(key)](
        *(query, key, value, d_output, lse, delta, mask.ends, mask.positions, d_key, d_value, *lists),
        *(lists.tiles.shape[1], num_tokens, scale, softcap, *_strides(query, key, value, d_output, d_key, d_value)),
        **constants,
    )
    return d_query, d_key, d_value, delta


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for each in tensors for stride in each.stride()[:2]]


def _empty(tensor: Tensor) -> Tensor:
    """Return an empty tensor [H, N, D], whose memory is [N, H, D], as a model's layers have it."""
    num_heads, num_tokens, width = tensor.shape
    return tensor.new_empty(num_tokens, num_heads, width).transpose(0, 1)


def _constants(kernel: str, query: Tensor, key: Tensor, mask: Mask, softcap: float) -> dict[str, Any]:
    width, of = query.shape[-1], tiles(kernel, query)
    return {
        "GROUP": len(query) // len(key),
        "WINDOW": mask.window,
        "SOFTCAP": softcap > 0,
        "WIDTH": width,
        "PADDED": max(16, triton.next_power_of_2(width)),
        "QUERIES": of.queries,
        "KEYS": of.keys,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": of.num_warps,
        "num_stages": of.num_stages,
    }
