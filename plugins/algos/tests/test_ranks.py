"""A step whose groups are divided among ranks gives every algorithm the results of one rank that has them all.

Ranks are threads here, which exchange sums as processes do; the exchange between processes has tests of its own.
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from algorithm_cases import CASES, sampled
from random_batches import random_batch

from rlplug.types import StepStatistics


class Meeting:
    """Where ranks bring tensors, all of them before any goes on."""

    def __init__(self, size):
        self.brought, self.barrier = [None] * size, threading.Barrier(size, timeout=60)

    def exchange(self, rank, tensor):
        self.brought[rank] = tensor
        self.barrier.wait()
        found = torch.stack(self.brought)
        self.barrier.wait()
        return found


@dataclasses.dataclass(frozen=True)
class ThreadStatistics(StepStatistics):
    meeting: Meeting = None
    rank: int = 0

    def gather(self, values):
        return self.meeting.exchange(self.rank, values.detach().to(torch.float64))


def on_ranks(algorithm, batch, size):
    """Each rank's rows, and what the algorithm makes of them; the last rank has no rows."""
    meeting = Meeting(size)
    home = batch.group_index % (size - 1)

    def advantages(rank):
        rows = (home == rank).nonzero().flatten()
        rows = rows[batch.group_index[rows].argsort(stable=True)]
        mine = batch.map(lambda tensor: tensor[rows])
        return rows, algorithm.advantages(mine.flat(ThreadStatistics(size, "cpu", meeting, rank)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(advantages, range(size)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_with_parts_of_a_step_get_what_one_rank_gets(case):
    for seed, size in ((1, 2), (2, 3), (3, 5)):
        algorithm, batch = sampled(case, random_batch(seed, torch.float64))
        whole = algorithm.advantages(batch.flat())
        for rows, part in on_ranks(algorithm, batch, size):
            assert part.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-12)
            for name in ("of_sequences", "of_tokens", "returns", "trains"):
                mine, all_of_them = getattr(part, name), getattr(whole, name)
                assert (mine is None) == (all_of_them is None)
                if mine is None or not len(rows):
                    continue
                expected = all_of_them[rows] if name == "of_sequences" else None
                if name != "of_sequences":
                    parts = all_of_them.split(batch.response_mask.sum(dim=1).tolist())
                    expected = torch.cat([parts[row] for row in rows])
                torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)
