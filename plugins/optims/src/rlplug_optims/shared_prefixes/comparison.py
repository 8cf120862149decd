"""Compares the kernels with attention by segments, for the heads of a model."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rlplug.models.attention.sequences import Sequences
from rlplug_optims.shared_prefixes.decision import head_size, option
from rlplug_optims.shared_prefixes.segments import SegmentAttention
from rlplug_optims.shared_prefixes.tree import TreeRow, depth_first, tree_row
from rlplug_optims.shared_prefixes.tree_attention import TreeAttention

PROMPTS: Final = (200, 30)
"""Of the trees that are compared: one longer than a tile of the kernels, one shorter."""
COMPLETIONS: Final = (130, 40, 129)


def differences(config: Any, device: str = "cuda") -> dict[str, float]:
    """Return how far the kernels in bfloat16 are from attention in float32: relative, in the 2-norm, by result.

    Args:
        config: Configuration of a text model.
        device: Where to compute.
    """

    heads = option(config, "num_attention_heads")
    shared = option(config, "num_key_value_heads") or heads
    size = head_size(config)
    row = compared_row()
    num_tokens = len(row.ids)
    generator = torch.Generator(device=device).manual_seed(0)
    *states, d_output = (
        torch.randn(count, num_tokens, size, device=device, generator=generator)
        for count in (heads, shared, shared, heads)
    )
    softcap = getattr(config, "attn_logit_softcapping", None)
    sequences = Sequences(torch.tensor([0, num_tokens], device=device), num_tokens, window=64, softcap=softcap)

    @torch.enable_grad()
    def results(attention: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in states]
        output = attention.to(device).attend(*leaves, sequences)
        gradients = torch.autograd.grad(output, leaves, d_output.to(dtype))
        return [each.detach().float() for each in (output, *gradients)]

    found = results(TreeAttention.of(row), torch.bfloat16)
    expected = results(SegmentAttention(row), torch.float32)
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    return {name: float((a - b).norm() / b.norm()) for name, a, b in zip(names, found, expected, strict=True)}


def compared_row() -> TreeRow:
    """Return a row with two trees, whose last block is cut."""
    rng = np.random.default_rng(0)
    sequences, groups = [], []
    for group, num_prompt in enumerate(PROMPTS):
        prompt = rng.integers(1, 1000, size=num_prompt)
        for num_new in COMPLETIONS:
            sequences.append(np.concatenate([prompt, rng.integers(1, 1000, size=num_new)]).astype(np.int32))
            groups.append(group)
    trains = [np.arange(len(each)) > 0 for each in sequences]
    return tree_row(sequences, trains, depth_first(sequences, groups))
