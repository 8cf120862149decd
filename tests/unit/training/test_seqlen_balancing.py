"""The partition: what it covers, what it keeps within, and how long ranks wait for one another."""

from __future__ import annotations

import random
import time
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplug.training import seqlen_balancing
from rlplug.training.seqlen_balancing import partition, schedule


def per_pass(passes, values):
    """Sum of ``values`` in each part, one row a pass."""
    return [[sum(values[item] for item in part) for part in parts] for parts in passes]


def wait(passes, costs):
    """What the slowest rank of each pass takes, over what the mean rank does."""
    sums = per_pass(passes, costs)
    return sum(map(max, sums)) / (sum(costs) / len(sums[0]))


def slowest(passes, costs):
    totals = [sum(rank) for rank in zip(*per_pass(passes, costs), strict=True)]
    return max(totals) / (sum(totals) / len(totals))


def lognormal(generator):
    """Median 812 tokens, 5% above 4,200, cut at 8,192."""
    return min(8192, max(1, round(generator.lognormvariate(6.7, 1.0))))


def two_lengths(generator):
    """95% of 100 to 500 tokens; 5% that ran into the limit of 8,192."""
    return 8192 if generator.random() < 0.05 else generator.randint(100, 500)


def draw(distribution, num_rows, seed):
    generator = random.Random(seed)
    return [distribution(generator) for _ in range(num_rows)]


@st.composite
def problems(draw):
    weights = draw(st.lists(st.integers(1, 60), min_size=1, max_size=60))
    quadratic = draw(st.sampled_from([0.0, 0.05, 10.0]))
    costs = [weight + quadratic * weight**2 for weight in weights]
    if draw(st.booleans()):
        return costs, weights, draw(st.integers(1, 9)), draw(st.integers(max(weights), 150))
    return costs, [1] * len(costs), draw(st.integers(1, 9)), draw(st.integers(1, 5))


@given(problems())
def test_each_item_once_within_the_budget(problem):
    costs, weights, num_ranks, max_weight = problem
    passes = schedule(costs, weights, num_ranks, max_weight)
    assert sorted(chain(*chain(*passes))) == list(range(len(costs)))
    assert all(len(parts) == num_ranks for parts in passes)
    assert max(chain(*per_pass(passes, weights))) <= max_weight


@given(problems())
def test_dealing_in_rounds_changes_nothing(problem):
    """Each part gets the same items in the same order: what differs would train on other micro-batches."""
    costs, weights, num_ranks, max_weight = problem
    items = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    results = []
    for many_parts in (1, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(seqlen_balancing, "MANY_PARTS", many_parts)
            limited = partition(items, costs, weights, num_ranks, max_weight, max_cost=2 * max(costs))
            results.append((schedule(*problem), limited))
    assert results[0] == results[1]


@given(problems())
def test_parts_are_empty_only_where_items_are_few(problem):
    *_, last = passes = schedule(*problem)
    assert all(part for parts in passes[:-1] for part in parts)
    assert any(last)
    assert all(last) or all(len(part) <= 1 for parts in passes for part in parts)


def test_an_item_that_fits_nowhere_leaves_no_rank_without_one():
    """37 fits beside no other part; the pass that it needs had nothing for the second rank."""
    assert schedule([51, 72, 37, 130], [51, 72, 37, 130], 2, 130) == [[[3], [1]], [[2], [0]]]


@given(problems())
def test_no_more_passes_than_first_fit_needs(problem):
    """First-fit decreasing knows nothing of costs; it takes at most 11/9 of the fewest parts possible."""
    _, weights, num_ranks, max_weight = problem
    bins: list[int] = []
    for weight in sorted(weights, reverse=True):
        index = next((i for i, filled in enumerate(bins) if filled + weight <= max_weight), len(bins))
        bins[index:] = [weight + (bins[index] if index < len(bins) else 0), *bins[index + 1 :]]
    first_fit = -(-len(bins) // num_ranks)
    assert -(-sum(weights) // (max_weight * num_ranks)) <= len(schedule(*problem)) <= first_fit + 1 + first_fit // 4


@pytest.mark.parametrize("quadratic_cost", [0.0, 3.5e-5])
@pytest.mark.parametrize("distribution", [lognormal, two_lengths])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 64])
def test_the_slowest_rank_is_within_five_percent(num_ranks, distribution, quadratic_cost):
    """64 rows a rank, a budget of twice the longest; 3.5e-5 is the attention of a model of 1.7B."""
    for seed in range(5):
        lengths = draw(distribution, 64 * num_ranks, seed)
        costs = [length + quadratic_cost * length**2 for length in lengths]
        passes = schedule(costs, lengths, num_ranks, 16384)
        assert slowest(passes, costs) <= 1.05, seed
        assert wait(passes, costs) <= 1.07, seed


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_a_pass_is_leveled_at_an_item_that_costs_more_than_a_part(num_ranks):
    """One 100 and many ones in two passes: with even parts, of about 55, ranks would wait for half of the first."""
    lengths = [100] + [1] * (110 * num_ranks)
    passes = schedule(lengths, lengths, num_ranks, 110)
    assert len(passes) == 2
    assert per_pass(passes, lengths)[0] == [100] * num_ranks
    assert wait(passes, lengths) <= 1.01


def test_the_cut_with_less_waiting_is_kept():
    """Budget = longest on 64 ranks: even parts make ranks wait for 27% of the time, leveled ones for 4%."""
    for seed in range(5):
        lengths = draw(lognormal, 64 * 8, seed)
        passes = schedule(lengths, lengths, 64, 8192)
        even, left = partition(sorted(range(512), key=lambda i: -lengths[i]), lengths, lengths, 128, 8192)
        assert not left
        loads = sorted((sum(lengths[i] for i in part) for part in even), reverse=True)
        assert sum(map(max, per_pass(passes, lengths))) <= loads[0] + loads[64]


def test_partition_is_longest_processing_time_first():
    """Three parts, worked out by hand: 7 7 6, 6 (12), 5 (12), 4 (11), 4 (15), 4 (16)."""
    costs = [7, 7, 6, 6, 5, 4, 4, 4]
    parts, left = partition(range(8), costs, [1] * 8, 3, 8)
    assert parts == [[0, 4, 7], [1, 5, 6], [2, 3]]
    assert left == []


def test_partition_returns_what_does_not_fit():
    costs = [5, 5, 4, 2, 1]
    assert partition(range(5), costs, costs, 2, 6) == ([[0], [1]], [2, 3, 4])
    assert partition(range(5), costs, [1] * 5, 2, 5, max_cost=7) == ([[0, 3], [1, 4]], [2])
    assert partition(range(5), costs, [1] * 5, 2, 1) == ([[0], [1]], [2, 3, 4])


def test_equal_items():
    passes = schedule([10.0] * 24, [10] * 24, 4, 30)
    assert per_pass(passes, [10] * 24) == [[30] * 4] * 2


def test_one_item_a_part():
    """Nothing fits beside anything: the number of passes is found without trying each."""
    passes = schedule([51.0] * 33, [51] * 33, 2, 100)
    assert [[len(part) for part in parts] for parts in passes] == [[1, 1]] * 16 + [[1, 0]]


def test_parts_of_similar_cost_run_at_the_same_time():
    """Four parts of 13, 10, 9 and 8: together they take 13 + 9, in another order at least 13 + 10."""
    passes = schedule([10, 9, 8, 7, 6], [1] * 5, 2, 2)
    assert per_pass(passes, [10, 9, 8, 7, 6]) == [[13, 10], [8, 9]]


def test_ranks_that_had_least_get_the_costliest():
    passes = schedule([9, 8, 3, 2], [1, 1, 1, 1], 2, 1)
    assert passes == [[[0], [1]], [[3], [2]]]


def test_an_item_beyond_the_budget_is_a_defect():
    with pytest.raises(AssertionError, match="weight 11, in parts of at most 10"):
        schedule([1.0, 11.0], [1, 11], 2, 10)


@pytest.mark.parametrize("max_weight", [8192, 16384])
def test_a_step_of_4096_rows_takes_no_time(max_weight):
    """It runs in every step: 0.02-0.04 s on one core; a quadratic method would take minutes."""
    lengths = draw(lognormal, 4096, 0)
    start = time.process_time()
    schedule(lengths, lengths, 64, max_weight)
    assert time.process_time() - start < 1.0
