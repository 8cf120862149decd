"""The first items of a balance over many parts, dealt in rounds of array operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def deal_in_rounds(
    items: Sequence[int],
    costs: Sequence[float],
    weights: Sequence[int],
    num_parts: int,
    max_weight: int,
    max_cost: float,
) -> tuple[list[int], list[float], list[int]]:
    """Give items to parts as ``seqlen_balancing.partition`` does, until one does not fit in the cheapest part.

    In a round, the next items go to the parts in the order of their cost, one each, up to the first part that costs as
    much as another one costs after its item: a few array operations for about as many items as there are parts.

    Returns:
        The part of each of the first items; the cost of each part; the weight that each can still take.
    """
    item_costs, item_weights = np.asarray(costs, dtype=float)[items], np.asarray(weights)[items]
    totals, remaining = np.zeros(num_parts), np.full(num_parts, max_weight)
    owners: list[int] = []
    while len(owners) < len(items):
        now = slice(len(owners), len(owners) + num_parts)
        cheapest = totals.argsort(kind="stable")[: len(items) - now.start]
        before, after = totals[cheapest], totals[cheapest] + item_costs[now]
        fits = (remaining[cheapest] >= item_weights[now]) & (after <= max_cost)
        is_next = np.append(True, before[1:] < np.minimum.accumulate(after)[:-1])
        goes = is_next & fits
        num_next = len(goes) if goes.all() else int(goes.argmin())
        chosen = cheapest[:num_next]
        totals[chosen] = after[:num_next]
        remaining[chosen] -= item_weights[now][:num_next]
        owners += chosen.tolist()
        if num_next < len(goes) and is_next[num_next]:
            break  # it does not fit
    return owners, totals.tolist(), remaining.tolist()
