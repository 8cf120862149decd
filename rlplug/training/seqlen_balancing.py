"""Balances sequences of different lengths over ranks and micro-batches, to reduce idle time at collectives."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

Part = list[int]
"""Indices of the items that one rank takes in one pass."""

MANY_PARTS = 256
"""Parts from which on items are dealt in rounds first."""

GOOD_ENOUGH = 1.01
"""Time of all passes, as a multiple of that without any waiting, at which no better cut is looked for."""


def schedule(costs: Sequence[float], weights: Sequence[int], num_ranks: int, max_weight: int) -> list[list[Part]]:
    """Return for each pass, for each rank, its items: as few passes as a bisection finds to suffice.

    Parts of similar cost run at the same time, and the costliest of a pass goes to the rank that has least so far.
    Parts are empty in the last pass only, and only where items are too few for every part to get one.

    Args:
        costs: Cost of each item, above 0, in any unit; there is at least one.
        weights: Weight of each item, at most ``max_weight``. Of two items the costlier is not the lighter.
        num_ranks: Parts of a pass.
        max_weight: Largest weight of a part.
    """
    assert max(weights) <= max_weight, f"an item of weight {max(weights)}, in parts of at most {max_weight}"
    items = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    total, heaviest = sum(weights), max(weights)

    def fits(num_passes: int) -> bool:
        if total <= num_ranks * num_passes * (max_weight - heaviest):
            return True  # a part is closed only above that weight, and all of them would have to be
        _, left = partition(items, costs, weights, num_ranks * num_passes, max_weight)
        return not left

    fewest = -(-total // (num_ranks * max_weight))
    one_item_each = -(-len(costs) // num_ranks)
    num_passes = fewest + bisect_left(range(fewest, one_item_each), True, key=fits)
    passes = _cut(items, costs, weights, num_ranks, max_weight, num_passes)
    _fill_empty_parts(passes, costs)
    return _deal(passes, costs)


def partition(
    items: Sequence[int],
    costs: Sequence[float],
    weights: Sequence[int],
    num_parts: int,
    max_weight: int,
    max_cost: float = math.inf,
) -> tuple[list[Part], list[int]]:
    """Return ``num_parts`` parts of about the same cost, and the items that did not fit.

    Longest processing time first (Graham 1969): the costliest item that is left goes to the part that costs least so
    far. A part that cannot hold it is closed, because the items that follow are rarely much lighter.

    Args:
        items: Costliest first.
        costs: Costs of all items.
        weights: Weights of all items.
        max_weight: Largest weight of a part.
        max_cost: Largest cost of a part; an item beyond it is left out, and lighter ones may still follow.
    """
    parts: list[Part] = [[] for _ in range(num_parts)]
    remaining = [max_weight] * num_parts
    open_parts = [(0.0, index) for index in range(num_parts)]
    num_dealt = 0
    if num_parts >= MANY_PARTS:
        from rlplug.training.many_parts import deal_in_rounds

        owners, totals, left_over = deal_in_rounds(items, costs, weights, num_parts, max_weight, max_cost)
        num_dealt = len(owners)
        for item, index in zip(items, owners, strict=False):
            parts[index].append(item)
        remaining, open_parts = left_over, [(total, index) for index, total in enumerate(totals)]
        heapq.heapify(open_parts)
    left = []
    for item in items[num_dealt:]:
        while open_parts and remaining[open_parts[0][1]] < weights[item]:
            heapq.heappop(open_parts)
        if not open_parts or open_parts[0][0] + costs[item] > max_cost:
            left.append(item)
            continue
        cost, index = open_parts[0]
        parts[index].append(item)
        remaining[index] -= weights[item]
        heapq.heapreplace(open_parts, (cost + costs[item], index))
    return parts, left


def _cut(
    items: Sequence[int],
    costs: Sequence[float],
    weights: Sequence[int],
    num_ranks: int,
    max_weight: int,
    num_passes: int,
) -> list[list[Part]]:
    """Return ``num_passes`` passes, each with its costliest part first.

    Parts that all cost about the same are best, until one cannot be that small: an item of its own, or two that fit
    nowhere else. Its pass takes as long as that part whatever else is in it, so the other parts are filled up to it and
    less is left for later passes. That is repeated, and the cut whose passes take least time together is kept.
    """
    shortest = sum(costs) / num_ranks
    best: list[list[Part]] = []
    leveled: list[list[Part]] = []
    for num_left in range(num_passes, 0, -1):
        parts, left = partition(items, costs, weights, num_ranks * num_left, max_weight)
        parts = _costliest_first(parts, costs)
        passes = leveled + [parts[start : start + num_ranks] for start in range(0, len(parts), num_ranks)]
        if left:
            break
        if not best or _duration(passes, costs) < _duration(best, costs):
            best = passes
        if _duration(best, costs) <= GOOD_ENOUGH * shortest:
            break
        level = _cost(parts[0], costs)
        parts, items = partition(items, costs, weights, num_ranks, max_weight, max_cost=level)
        leveled.append(_costliest_first(parts, costs))
    return best


def _fill_empty_parts(passes: list[list[Part]], costs: Sequence[float]) -> None:
    """Give each empty part the cheapest item of the costliest part that can spare one.

    Items that fit nowhere else can leave a part without any; its rank would run a pass for nothing.
    """
    parts = [part for each in passes for part in each]
    for empty in (part for part in parts if not part):
        if not (donors := [part for part in parts if len(part) > 1]):
            return
        donor = max(donors, key=partial(_cost, costs=costs))
        cheapest = min(donor, key=costs.__getitem__)
        donor.remove(cheapest)
        empty.append(cheapest)
    passes[:] = [_costliest_first(each, costs) for each in passes]


def _deal(passes: list[list[Part]], costs: Sequence[float]) -> list[list[Part]]:
    """Put the parts of each pass in the order of ranks."""
    totals = [0.0] * len(passes[0])
    dealt_passes = []
    for parts in passes:
        least_first = sorted(range(len(totals)), key=totals.__getitem__)
        dealt: list[Part] = [[] for _ in parts]
        for rank, part in zip(least_first, parts, strict=True):
            dealt[rank] = part
            totals[rank] += _cost(part, costs)
        dealt_passes.append(dealt)
    return dealt_passes


def _duration(passes: list[list[Part]], costs: Sequence[float]) -> float:
    return sum(_cost(parts[0], costs) for parts in passes)


def _costliest_first(parts: list[Part], costs: Sequence[float]) -> list[Part]:
    return sorted(parts, key=partial(_cost, costs=costs), reverse=True)


def _cost(part: Part, costs: Sequence[float]) -> float:
    return sum(costs[item] for item in part)
