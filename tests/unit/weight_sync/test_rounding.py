"""Rounding of merged adapters to bfloat16."""

from __future__ import annotations

import torch

from rlplug.weight_sync.low_rank import round_to_bfloat16

SHAPE = (300, 500)


def test_small_updates_arrive_on_average() -> None:
    """Rounding to the nearest loses every one of them: an engine then samples from the policy before the update."""
    weights = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    for update in (1e-4, -1e-4):
        updated = weights * (1 + update)
        assert torch.equal(updated.bfloat16().float(), weights)
        rounded = round_to_bfloat16(updated).float()
        moved = ((rounded - weights) / weights).mean().item()
        assert abs(moved - update) < 2e-5
        assert (rounded - updated).abs().max() <= (weights * 2**-7).abs().max()


def test_the_parts_of_ranks_are_those_of_the_whole() -> None:
    """Of 150,000 positions in three tiles. A rank may have no rows."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    starts = (0, 100, 200, SHAPE[0])
    parts = [round_to_bfloat16(values[start : start + 100], start * SHAPE[1]) for start in starts]
    assert torch.equal(torch.cat(parts), round_to_bfloat16(values))


def test_values_that_need_no_rounding_stay() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-130, float("inf"), float("-inf"), float("nan")])
    rounded = round_to_bfloat16(values.repeat(1000, 1))
    assert torch.equal(rounded[:, :-1], values[:-1].bfloat16().repeat(1000, 1))
    assert rounded[:, -1].isnan().all()
    of_cuda = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert round_to_bfloat16(of_cuda.repeat(1000)).isnan().all()
