"""Attention with a soft cap or sinks, from products that are all in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from rlplug.models.attention.sequences import Sequences


def attention_from_products(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sequences: Sequences) -> Tensor:
    """Return attention with a soft cap or sinks, which no kernel of torch has."""
    scale, softcap, sinks = sequences.scale, sequences.softcap, sequences.sinks
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    products = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        products = softcap * torch.tanh(products / softcap)
    products = products.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(products.dtype)[:, None, None].expand(*products.shape[:-1], 1)
        products = torch.cat([products, column], dim=-1)
    weights = products.softmax(dim=-1, dtype=torch.float32)[..., : key.shape[-2]].to(query.dtype)
    return weights @ value
