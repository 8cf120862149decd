"""The batch plan's cuts into micro-batches lose nothing and keep to their limits, whatever the number of ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplug.training.batch_plan import BatchPlan, BatchSizes


@st.composite
def splits(draw):
    """A plan of up to 5 data ranks by count, budgets or neither; lengths of a step's rows; a mini-batch of them."""
    data_size, sequence_size = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=30))
    rows = draw(st.permutations(range(len(lengths))))[: draw(st.integers(1, len(lengths)))]
    budgets = st.integers(-(-max(lengths) // sequence_size), 200)
    limits = draw(
        st.one_of(
            st.just({}),
            st.fixed_dictionaries({"micro_batch_size_per_gpu": st.integers(1, 8)}),
            st.fixed_dictionaries({"max_tokens_per_gpu": budgets, "max_tokens_per_gpu_forward": budgets}),
        )
    )
    world_size = data_size * sequence_size
    plan = BatchPlan(
        BatchSizes(prompts_per_step=world_size, **limits),
        world_size,
        data_size,
        sequence_size,
        max(lengths),
        quadratic_cost=draw(st.sampled_from([0.0, 0.01, 1.0])),
    )
    return plan, rows, lengths, draw(st.sampled_from(["update", "forward"]))


def passes_of(plan, rows, lengths, phase="update"):
    return plan.passes(rows, lengths, phase)


@given(splits())
def test_micro_batches_of_all_ranks_are_exactly_the_rows(split):
    seen = Counter(row for mine in passes_of(*split) for micro in mine if not micro.is_filler for row in micro.indices)
    assert seen == Counter(split[1])


@given(splits())
def test_every_rank_runs_the_same_number_of_passes(split):
    _, rows, lengths, _ = split
    ranks = passes_of(*split)
    assert len({len(mine) for mine in ranks}) == 1
    assert any(not mine[-1].is_filler for mine in ranks)  # no pass is filler on every rank
    for mine in ranks:
        assert not any(micro.is_filler for micro in mine[:-1])
        assert all(micro.indices for micro in mine)
        if mine[-1].is_filler:
            (row,) = mine[-1].indices
            assert row in rows
            assert lengths[row] == min(lengths[row] for row in rows)


@given(splits())
def test_micro_batches_respect_their_limit(split):
    plan, rows, lengths, phase = split
    for mine in passes_of(*split):
        for micro in mine:
            if plan.max_rows:
                assert len(micro.indices) <= plan.max_rows[phase]
            else:
                assert sum(lengths[row] for row in micro.indices) <= plan.max_tokens[phase] * plan.sequence_size
    if plan.max_rows:
        assert len(passes_of(*split)[0]) == -(-len(rows) // (plan.data_size * plan.max_rows[phase]))


@given(splits())
def test_the_pass_with_most_tokens_comes_first(split):
    lengths = split[2]
    ranks = passes_of(*split)
    most = [
        max(sum(lengths[row] for row in micro.indices) for micro in together) for together in zip(*ranks, strict=True)
    ]
    assert most == sorted(most, reverse=True)


@given(splits(), st.integers(0, 3))
def test_only_the_set_of_rows_and_their_lengths_count(split, shift):
    """Nothing but the arguments enters: what ranks compute on their own is the same on all."""
    plan, rows, lengths, phase = split
    elsewhere = [row + shift for row in rows]
    moved = passes_of(plan, elsewhere, [0] * shift + lengths, phase)
    here = passes_of(plan, rows, lengths, phase)
    assert [[[row - shift for row in m.indices] for m in mine] for mine in moved] == [
        [list(m.indices) for m in mine] for mine in here
    ]


@pytest.mark.parametrize(("budget", "rows_each"), [(10, 1), (19, 1), (20, 2), (29, 2), (30, 3)])
def test_token_budget_is_exact(budget, rows_each):
    plan = BatchPlan(BatchSizes(max_tokens_per_gpu=budget, max_tokens_per_gpu_forward=6 * budget), world_size=1)
    assert len(plan.passes(range(6), [10] * 6)[0][0].indices) == rows_each
    assert len(plan.passes(range(6), [10] * 6, "forward")[0]) == 1


def test_ranks_that_share_sequences_share_the_budget():
    plan = BatchPlan(BatchSizes(prompts_per_step=4, max_tokens_per_gpu=10), 4, data_size=1, sequence_size=4)
    cut = plan.passes(range(8), [10] * 8)[0]
    assert [len(micro.indices) for micro in cut] == [4, 4]


def test_tokens_count_and_not_rows_times_the_longest():
    plan = BatchPlan(BatchSizes(max_tokens_per_gpu=20), world_size=1)
    cut = plan.passes(range(7), [14, 1, 1, 1, 1, 1, 1])[0]
    assert [sorted(micro.indices) for micro in cut] == [list(range(7))]


def test_one_huge_row():
    """It has a part for itself; the short rows make up for it on the other rank."""
    plan = BatchPlan(BatchSizes(prompts_per_step=2, max_tokens_per_gpu=100), world_size=2)
    lengths = [100] + [2] * 50
    assert [[len(micro.indices) for micro in mine] for mine in passes_of(plan, range(51), lengths)] == [[1], [50]]


def test_fewer_rows_than_ranks():
    plan = BatchPlan(BatchSizes(prompts_per_step=4), world_size=4)
    assert [[(m.indices, m.is_filler) for m in mine] for mine in passes_of(plan, [7, 2], [0, 0, 9, 0, 0, 0, 0, 5])] == [
        [((2,), False)],
        [((7,), False)],
        [((7,), True)],
        [((7,), True)],
    ]


@pytest.mark.parametrize(("quadratic_cost", "beside"), [(0.0, 4), (0.5, 1)])
def test_attention_moves_short_rows_to_the_rank_without_the_long_one(quadratic_cost, beside):
    """8 + 4 x 2 against 8 x 2 tokens; with ``n + n**2 / 2`` a cost of 40 + 4 against 11 x 4."""
    plan = BatchPlan(BatchSizes(prompts_per_step=2), world_size=2, quadratic_cost=quadratic_cost)
    (long,) = (m for mine in passes_of(plan, range(13), [8] + [2] * 12) for m in mine if 0 in m.indices)
    assert len(long.indices) == 1 + beside
