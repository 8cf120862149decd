"""The batch plan: what it refuses, and that its cuts lose nothing whatever the number of ranks."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplug.batching import BatchPlan, BatchSizes, rank_share
from rlplug.errors import ConfigError


def refusal(world_size=1, **sizes):
    with pytest.raises(ConfigError) as caught:
        BatchPlan(BatchSizes(**sizes), world_size)
    return str(caught.value)


def test_defaults_are_one_update_a_step():
    plan = BatchPlan(BatchSizes(), world_size=4)
    assert (plan.num_completions, plan.mini_batch_size, plan.num_mini_batches, plan.updates_per_step) == (
        256,
        256,
        1,
        1,
    )
    assert plan.is_on_policy


@pytest.mark.parametrize(("epochs", "mini_batch", "updates"), [(2, None, 2), (1, 128, 2), (3, 64, 12)])
def test_more_updates_are_off_policy(epochs, mini_batch, updates):
    plan = BatchPlan(BatchSizes(num_epochs=epochs, mini_batch_size=mini_batch), world_size=1)
    assert (plan.updates_per_step, plan.is_on_policy) == (updates, False)


@pytest.mark.parametrize("key", list(vars(BatchSizes())))
@pytest.mark.parametrize("value", [0, -2])
def test_sizes_below_one(key, value):
    assert refusal(**{key: value}) == f"model.batch.{key} is {value}: give at least 1."


@pytest.mark.parametrize(
    ("prompts", "world_size", "nearest"), [(10, 4, "8 and 12"), (3, 4, "4"), (33, 32, "32 and 64"), (1, 2, "2")]
)
def test_prompts_that_do_not_divide_over_ranks(prompts, world_size, nearest):
    message = refusal(world_size, prompts_per_step=prompts)
    assert message == (
        f"model.batch.prompts_per_step is {prompts}, which does not divide over {world_size} ranks. "
        f"Nearest that do: {nearest}."
    )


@pytest.mark.parametrize(
    ("mini_batch", "world_size", "nearest"),
    [
        (100, 1, "96 and 192"),  # divides neither
        (20, 4, "16 and 24"),
        (6, 4, "4 and 8"),  # divides 192, and not over the ranks
        (1, 4, "4"),
        (193, 1, "192"),
        (1000, 2, "192"),
    ],
)
def test_mini_batch_that_does_not_divide(mini_batch, world_size, nearest):
    message = refusal(world_size, prompts_per_step=32, group_size=6, mini_batch_size=mini_batch)
    assert message.startswith(f"model.batch.mini_batch_size is {mini_batch}: ")
    assert "192 completions of a step (prompts_per_step 32 x group_size 6)" in message
    assert message.endswith(f"divide over {world_size} ranks. Nearest that do: {nearest}.")


@given(prompts=st.integers(1, 12), group=st.integers(1, 6), mini_batch=st.integers(1, 90), world_size=st.integers(1, 4))
def test_every_named_value_works_and_none_between_does(prompts, group, mini_batch, world_size):
    """Whatever is refused, the values that the message names are accepted, and nothing nearer is."""

    def problem(**sizes):
        try:
            BatchPlan(BatchSizes(**{"group_size": group, **sizes}), world_size)
        except ConfigError as error:
            return str(error)
        return None

    for key, value, others in (
        ("prompts_per_step", prompts, {}),
        ("mini_batch_size", mini_batch, {"prompts_per_step": world_size * 2}),
    ):
        message = problem(**{key: value}, **others)
        if message is None:
            continue
        named = [int(number) for number in re.findall(r"\d+", message.split("Nearest that do:")[1])]
        assert 1 <= len(named) <= 2
        assert all(problem(**{key: number}, **others) is None for number in named)
        for between in range(min(*named, value) + 1, max(*named, value)):
            assert between in named or problem(**{key: between}, **others) is not None


def test_both_micro_batch_sizes():
    assert refusal(micro_batch_size_per_gpu=4, max_tokens_per_gpu=1000) == (
        "model.batch.micro_batch_size_per_gpu and model.batch.max_tokens_per_gpu are both set: keep one."
    )


def test_token_budget_below_the_longest_sequence():
    plan = BatchPlan(BatchSizes(max_tokens_per_gpu=100), world_size=1)
    plan.check_longest(100)
    with pytest.raises(ConfigError, match=r"max_tokens_per_gpu is 100, .* 101 tokens .*: give at least 101"):
        plan.check_longest(101)
    BatchPlan(BatchSizes(), world_size=1).check_longest(10**9)


@given(
    prompts=st.integers(1, 6),
    group=st.integers(1, 6),
    parts=st.integers(1, 36),
    fewer=st.integers(0, 35),
    epoch=st.integers(0, 3),
)
def test_mini_batches_partition_the_rows(prompts, group, parts, fewer, epoch):
    total = prompts * group
    size = max(size for size in range(1, total + 1) if total % size == 0 and size <= max(1, total // parts))
    plan = BatchPlan(BatchSizes(prompts_per_step=prompts, group_size=group, mini_batch_size=size), world_size=1)
    num_rows = max(1, total - fewer)  # an algorithm may have left groups out
    mini_batches = plan.mini_batches(num_rows, epoch, seed=3)
    assert sorted(row for rows in mini_batches for row in rows) == list(range(num_rows))
    assert len(mini_batches) == min(plan.num_mini_batches, num_rows)
    assert max(map(len, mini_batches)) - min(map(len, mini_batches)) <= 1
    if num_rows == total:
        assert {len(rows) for rows in mini_batches} == {size}


def test_later_epochs_shuffle():
    plan = BatchPlan(BatchSizes(prompts_per_step=8, group_size=8, mini_batch_size=16, num_epochs=3), world_size=1)
    first, second, third = (plan.mini_batches(64, epoch, seed=0) for epoch in range(3))
    assert first == [list(range(start, start + 16)) for start in range(0, 64, 16)]
    assert first != second != third != first
    assert second == plan.mini_batches(64, 1, seed=0) != plan.mini_batches(64, 1, seed=1)


@pytest.mark.parametrize("epoch", [0, 1])
def test_mini_batches_do_not_depend_on_the_number_of_ranks(epoch):
    sizes = BatchSizes(prompts_per_step=12, group_size=4, mini_batch_size=24, num_epochs=2)
    cuts = [BatchPlan(sizes, world_size).mini_batches(48, epoch, seed=5) for world_size in (1, 2, 3, 4)]
    assert all(cut == cuts[0] for cut in cuts)


@st.composite
def splits(draw):
    """A plan of 1 to 4 ranks by count, by budget or by neither; lengths of a step's rows; a mini-batch of them."""
    world_size = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=30))
    rows = draw(st.permutations(range(len(lengths))))[: draw(st.integers(1, len(lengths)))]
    limits = draw(
        st.one_of(
            st.just({}),
            st.fixed_dictionaries({"micro_batch_size_per_gpu": st.integers(1, 8)}),
            st.fixed_dictionaries({"max_tokens_per_gpu": st.integers(max(lengths), 200)}),
        )
    )
    return BatchPlan(BatchSizes(prompts_per_step=world_size, **limits), world_size), rows, lengths


@given(splits())
def test_micro_batches_of_all_ranks_are_exactly_the_rows(split):
    plan, rows, lengths = split
    passes = [plan.micro_batches(rows, lengths, rank) for rank in range(plan.world_size)]
    seen = Counter(row for mine in passes for micro in mine if not micro.is_filler for row in micro.indices)
    assert seen == Counter(rows)
    assert all(micro.indices for mine in passes for micro in mine)


@given(splits())
def test_every_rank_runs_the_same_number_of_passes(split):
    plan, rows, lengths = split
    passes = [plan.micro_batches(rows, lengths, rank) for rank in range(plan.world_size)]
    assert len({len(mine) for mine in passes}) == 1
    assert any(not micro.is_filler for mine in passes for micro in mine[-1:])  # no pass is filler on every rank
    for mine in passes:
        fillers = [micro for micro in mine if micro.is_filler]
        assert mine[len(mine) - len(fillers) :] == fillers
        for filler in fillers:
            (row,) = filler.indices
            assert row in rows
            assert lengths[row] == min(lengths[row] for row in rows)


@given(splits())
def test_micro_batches_respect_their_limit(split):
    plan, rows, lengths = split
    for rank in range(plan.world_size):
        real = [micro for micro in plan.micro_batches(rows, lengths, rank) if not micro.is_filler]
        for micro in real:
            if plan.max_tokens is not None:
                assert len(micro.indices) * max(lengths[row] for row in micro.indices) <= plan.max_tokens
            if plan.micro_batch_size is not None:
                assert len(micro.indices) <= plan.micro_batch_size
        if plan.max_tokens is None:
            share = rank_share(rows, rank, plan.world_size)
            assert [row for micro in real for row in micro.indices] == list(share)
            assert len(real) == -(-len(share) // (plan.micro_batch_size or len(rows)))


def test_token_budget_packs_by_length():
    plan = BatchPlan(BatchSizes(max_tokens_per_gpu=20), world_size=1)
    cut = plan.micro_batches(range(6), [5, 10, 2, 10, 5, 2], rank=0)
    assert [micro.indices for micro in cut] == [(1, 3), (0, 4, 2, 5)]


@pytest.mark.parametrize(("budget", "rows_each"), [(10, 1), (19, 1), (20, 2), (29, 2), (30, 3)])
def test_token_budget_is_exact(budget, rows_each):
    plan = BatchPlan(BatchSizes(max_tokens_per_gpu=budget), world_size=1)
    assert len(plan.micro_batches(range(6), [10] * 6, rank=0)[0].indices) == rows_each


@given(num_items=st.integers(0, 40), world_size=st.integers(1, 8))
def test_rank_shares_partition_in_order(num_items, world_size):
    items = list(range(num_items))
    shares = [rank_share(items, rank, world_size) for rank in range(world_size)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_printed_plan_names_what_will_run():
    plan = BatchPlan(BatchSizes(prompts_per_step=8, group_size=4, mini_batch_size=16), world_size=2)
    table = {name: (value, meaning) for name, value, meaning in plan.rows()}
    assert table["ranks"][0] == "2"
    assert table["prompts a step"] == ("8", "4 a rank")
    assert table["completions a step"] == ("32", "groups of 4")
    assert table["mini-batch"] == ("16", "8 a rank")
    assert table["optimizer steps"] == ("2 a step", "1 epoch(s) x 2")
    assert table["micro-batch"][0] == "8 completions"
    assert table["old_logprobs"][0] == "computed"
    budget = BatchPlan(BatchSizes(max_tokens_per_gpu=512), world_size=1)
    table = {name: value for name, value, _ in budget.rows()}
    assert (table["micro-batch"], table["old_logprobs"]) == ("512 tokens", "skipped")


def test_the_printed_plan_says_when_old_logprobs_are_computed():
    def row(reason, **sizes):
        plan = BatchPlan(BatchSizes(prompts_per_step=4, group_size=2, **sizes), 1)
        return next(rest for name, *rest in plan.rows(reason) if name == "old_logprobs")

    assert row(None) == ["skipped", "exactly on-policy: the current logprobs"]
    assert row("for the values") == ["computed", "for the values"]
    assert row("for the values", num_epochs=2) == ["computed", "several optimizer steps per rollout"]
