"""Compares ways of cutting a step into passes by how evenly they share its work; takes a few seconds.

Run ``python benchmarks/balance.py``.

A step's sequences, of lengths drawn from two distributions with long tails, are cut into passes of at most
16,384 tokens a rank, twice the longest. Compared are

- ``contiguous``: each rank takes the next share of the rows and fills its passes in the order of length;
- ``kk``: the largest differencing method of Karmarkar and Karp, which knows no budget: ``over`` counts the draws in
  which it exceeds that;
- ``lpt``: longest processing time first, :func:`rlplug.training.seqlen_balancing.partition`;
- ``schedule``: what runs use, :func:`rlplug.training.seqlen_balancing.schedule`: ``lpt``, and passes leveled where
  parts are uneven.

All but ``contiguous`` get the number of passes that ``schedule`` finds.

Ranks meet in every pass, so a step takes the sum over passes of the slowest rank. ``wait`` is that sum over what the
mean rank does, ``slowest`` the largest total of a rank over the mean; 1 is perfect. With few rows a rank, one sequence
can be more than a rank's share: no cut has less than ``bound``. The cost of n tokens is ``n``, or with attention
``n + 3.5e-5 n**2``, that of a model of 1.7B. Printed are the median over five seeds and the worst of them; for
``slowest`` the worst; for the milliseconds the median.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from rlplug.distributed.mesh import rank_share
from rlplug.training.seqlen_balancing import Part, partition, schedule

BUDGET = 16384
NUM_SEEDS = 5
ATTENTION = 3.5e-5
LARGEST_KK = 1024
"""Rows that the largest differencing method is asked for at most: it takes rows x parts steps."""

METHODS = ("contiguous", "kk", "lpt", "schedule")
Passes = list[list[Part]]


def lognormal(generator: random.Random) -> int:
    """Median 812 tokens, 5% above 4,200, cut at 8,192."""
    return min(8192, max(1, round(generator.lognormvariate(6.7, 1.0))))


def two_lengths(generator: random.Random) -> int:
    """95% short answers of 100 to 500 tokens; 5% that ran into the limit of 8,192."""
    return 8192 if generator.random() < 0.05 else generator.randint(100, 500)


def karmarkar_karp(costs: Sequence[float], num_parts: int) -> list[Part]:
    """Join the two most uneven states, large parts of one with small parts of the other, until one state is left."""
    # a state: minus its largest part less its smallest, a number to break ties, its parts that are not empty
    states = [(-cost, item, [(cost, [item])]) for item, cost in enumerate(costs)]
    heapq.heapify(states)
    while len(states) > 1:
        _, tie, large = heapq.heappop(states)
        _, _, small = heapq.heappop(states)
        empty: list[tuple[float, Part]] = [(0.0, [])]
        large, small = large + empty * (num_parts - len(large)), small + empty * (num_parts - len(small))
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(large, reversed(small), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(states, (joined[-1][0] - joined[0][0], tie, [part for part in joined if part[1]]))
    parts = [part for _, part in states[0][2]]
    return parts + [[] for _ in range(num_parts - len(parts))]


def contiguous(lengths: Sequence[int], num_ranks: int) -> Passes:
    ranks: list[list[Part]] = []
    for rank in range(num_ranks):
        cut: list[Part] = []
        for row in sorted(rank_share(range(len(lengths)), rank, num_ranks), key=lambda row: -lengths[row]):
            if not cut or sum(lengths[item] for item in cut[-1]) + lengths[row] > BUDGET:
                cut.append([])
            cut[-1].append(row)
        ranks.append(cut)
    num_passes = max(map(len, ranks))
    filled = [cut + [[]] * (num_passes - len(cut)) for cut in ranks]
    return [list(parts) for parts in zip(*filled, strict=True)]


def in_passes(parts: list[Part], costs: Sequence[float], num_ranks: int) -> Passes:
    """Parts of similar cost at the same time, the costliest to the rank that has least: as ``schedule`` does."""
    parts = sorted(parts, key=lambda part: -sum(costs[item] for item in part))
    totals, passes = [0.0] * num_ranks, []
    for start in range(0, len(parts), num_ranks):
        ranks = sorted(range(num_ranks), key=totals.__getitem__)
        dealt: list[Part] = [[] for _ in ranks]
        for rank, part in zip(ranks, parts[start : start + num_ranks], strict=True):
            dealt[rank] = part
            totals[rank] += sum(costs[item] for item in part)
        passes.append(dealt)
    return passes


def measure(passes: Passes, costs: Sequence[float]) -> tuple[float, float]:
    """Return ``wait`` and ``slowest``."""
    sums = [[sum(costs[item] for item in part) for part in parts] for parts in passes]
    totals = [sum(rank) for rank in zip(*sums, strict=True)]
    mean = sum(totals) / len(totals)
    return sum(map(max, sums)) / mean, max(totals) / mean


def largest_differencing(costs: list[float], num_ranks: int, num_parts: int) -> Passes:
    return in_passes(karmarkar_karp(costs, num_parts), costs, num_ranks)


def longest_first(costs: list[float], lengths: list[int], num_ranks: int, num_parts: int) -> Passes:
    items = sorted(range(len(costs)), key=lambda item: -costs[item])
    parts, left = partition(items, costs, lengths, num_parts, BUDGET)
    assert not left
    return in_passes(parts, costs, num_ranks)


def compare(draw: Callable[[random.Random], int], num_ranks: int, rows_a_rank: int, attention: float) -> None:
    """Print one line of the table."""
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in METHODS}
    bounds, num_passes, num_over = [], [], 0
    for seed in range(NUM_SEEDS):
        generator = random.Random(seed)
        lengths = [draw(generator) for _ in range(num_ranks * rows_a_rank)]
        costs = [length + attention * length**2 for length in lengths]
        bounds.append(max(1.0, max(costs) * num_ranks / sum(costs)))
        num_passes.append(len(schedule(costs, lengths, num_ranks, BUDGET)))
        num_parts = num_passes[-1] * num_ranks
        cuts: dict[str, Callable[[], Passes]] = {
            "contiguous": partial(contiguous, lengths, num_ranks),
            "kk": partial(largest_differencing, costs, num_ranks, num_parts),
            "lpt": partial(longest_first, costs, lengths, num_ranks, num_parts),
            "schedule": partial(schedule, costs, lengths, num_ranks, BUDGET),
        }
        for name, cut in cuts.items():
            if name == "kk" and len(lengths) > LARGEST_KK:
                continue
            start = time.perf_counter()
            passes = cut()
            milliseconds = (time.perf_counter() - start) * 1e3
            results[name].append((*measure(passes, costs), milliseconds))
            if name == "kk":
                num_over += max(sum(lengths[item] for item in part) for parts in passes for part in parts) > BUDGET
    cells = [f"{num_ranks:5}", f"{rows_a_rank:4}", f"{statistics.median(num_passes):6.0f}", f"{max(bounds):5.3f}"]
    for runs in results.values():
        cells.append(describe(runs) if runs else f"{'-':>29}")
    cells.append(f"{num_over:7}" if results["kk"] else f"{'-':>7}")
    print(" | ".join(cells))


def describe(runs: list[tuple[float, float, float]]) -> str:
    wait, slowest, milliseconds = (list(column) for column in zip(*runs, strict=True))
    return (
        f"{statistics.median(wait):6.3f} ({max(wait):5.3f}) {max(slowest):6.3f} {statistics.median(milliseconds):7.1f}"
    )


def main() -> None:
    names = " | ".join(f"{name:^29}" for name in METHODS)
    columns = " | ".join(["  wait (worst) slowest      ms"] * len(METHODS))
    for draw in (lognormal, two_lengths):
        for attention in (0.0, ATTENTION):
            print(f"\n{draw.__name__}{', with attention' if attention else ''}")
            print(f"{'':5} | {'rows':4} | {'':6} | {'':5} | {names} | kk")
            print(f"ranks | each | passes | bound | {columns} | over")
            for num_ranks in (2, 4, 8, 16, 32, 64):
                for rows_a_rank in (8, 64):
                    compare(draw, num_ranks, rows_a_rank, attention)


if __name__ == "__main__":
    main()
