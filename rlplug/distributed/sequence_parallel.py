"""Ranks that share the tokens of a packed row: DeepSpeed-Ulysses (arXiv 2309.14509), and sums over their parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from rlplug.errors import ConfigError


def sequences_to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange [heads, n, head_dim] of all heads for [heads / ranks, N, head_dim] of the whole row, in one call.

    Raises:
        ConfigError: The heads do not divide over the ranks.
    """
    size = group.size()
    if query.shape[0] % size or (key.shape[0] % size and size % key.shape[0]):
        raise ConfigError(
            f"trainer.strategy.init_args.sequence is {size}, and the model has {query.shape[0]} attention heads and "
            f"{key.shape[0]} key-value heads on a rank: give a size that divides the first, and divides the second or "
            "is a multiple of it."
        )
    repeats = max(1, size // key.shape[0])
    key, value = (states.repeat_interleave(repeats, dim=0) for states in (key, value))
    parts = [states.view(size, -1, *states.shape[1:]) for states in (query, key, value)]
    received = _all_to_all(torch.cat(parts, dim=1), group)  # [ranks, heads / ranks, n, head_dim], the row's parts
    whole = received.transpose(0, 1).flatten(1, 2)
    query, key, value = torch.split(whole, [part.shape[1] for part in parts])
    return query, key, value


def heads_to_sequences(output: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [heads / ranks, N, head_dim] back for [heads, n, head_dim]."""
    parts = output.reshape(len(output), group.size(), -1, output.shape[-1]).transpose(0, 1)
    return _all_to_all(parts, group).flatten(0, 1)


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send ``parts[r]`` to rank ``r`` of the group, and return the parts that the ranks sent, in rank order."""
    sizes = [1] * group.size()
    received: Tensor = all_to_all_single_autograd(parts.contiguous(), sizes, sizes, group)
    return received


def sum_of_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' parts, whose gradient passes to each part unchanged."""
    whole: Tensor = _SumOfParts.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


class _SumOfParts(torch.autograd.Function):
    """All-reduce whose gradient passes to each rank's part unchanged.

    Every rank computes the same loss from the sum, so each already has the whole gradient.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
