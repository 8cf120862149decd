"""The kernels of tree attention against torch's attention, gradients included: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
pytest.importorskip("triton")
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from rlplug_optims.shared_prefixes.segments import SegmentAttention  # noqa: E402
from rlplug_optims.shared_prefixes.tree import depth_first, tree_row  # noqa: E402
from rlplug_optims.shared_prefixes.tree_attention import TreeAttention  # noqa: E402

from rlplug.models.attention.sequences import Sequences  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((2, 2, 16), {}),
        ((2, 1, 24), {"scale": 0.3, "softcap": 2.0}),
        ((3, 1, 8), {"sinks": True, "window": 100}),
    ],
)
def test_attention_and_its_gradients_are_those_of_segments(heads, options):
    """It catches a block that is left out or not masked, at the row's cut end too, and a wrong stride."""
    num_heads, num_shared, width = heads
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    prompts = [rng.integers(1, 9, size=size) for size in (150, 150, 20, 20)]
    sequences = [
        np.concatenate([prompts[index // 2 * 2], rng.integers(9, 99, size=size)]).astype(np.int32)
        for index, size in enumerate((90, 60, 70, 5))
    ]
    row = tree_row(sequences, [np.arange(len(each)) > 0 for each in sequences], depth_first(sequences, [0, 0, 1, 1]))
    num_tokens = len(row.ids)
    states = [  # [heads, N, width] of memory [N, heads, width], as a model's layers have it
        torch.randn(num_tokens, count, width, generator=generator).to(DEVICE).transpose(0, 1)
        for count in (num_heads, num_shared, num_shared)
    ]
    d_output = torch.randn(num_heads, num_tokens, width, generator=generator).to(DEVICE)
    sinks = torch.randn(num_heads, generator=generator).to(DEVICE) if options.get("sinks") else None
    how = {name: value for name, value in options.items() if name != "sinks"}

    def results(attention):
        leaves = [each.clone().requires_grad_() for each in (*states, *([] if sinks is None else [sinks]))]
        borders = torch.tensor([0, num_tokens], device=DEVICE)
        sequences = Sequences(borders, num_tokens, **how, sinks=None if sinks is None else leaves[3])
        output = attention.to(DEVICE).attend(*leaves[:3], sequences)
        return [output.detach(), *torch.autograd.grad(output, leaves, d_output)]

    for ours, theirs in zip(results(TreeAttention.of(row)), results(SegmentAttention(row)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
