"""The batch plan: the sizes that it resolves and refuses, its mini-batches, and what it prints."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlplug.distributed.mesh import rank_share
from rlplug.errors import ConfigError
from rlplug.models.shape import attention_cost
from rlplug.training.batch_plan import BatchPlan, BatchSizes


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


@pytest.mark.parametrize("key", sorted(vars(BatchSizes()).keys() - {"share_prefixes"}))
@pytest.mark.parametrize("value", [0, -2])
def test_sizes_below_one(key, value):
    assert refusal(**{key: value}).startswith(f"model.batch.{key} is {value}: give a number from 1 up to ")


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
        (5, 8, "8"),
        (3, 4, "4"),  # divides 192, and leaves a rank without
        (193, 1, "192"),
        (1000, 2, "192"),
    ],
)
def test_mini_batch_that_does_not_divide(mini_batch, world_size, nearest):
    message = refusal(world_size, prompts_per_step=32, group_size=6, mini_batch_size=mini_batch)
    assert message.startswith(f"model.batch.mini_batch_size is {mini_batch}: ")
    assert "192 completions of a step (prompts_per_step 32 x group_size 6)" in message
    assert message.endswith(f"be at least {world_size}, one a rank. Nearest that do: {nearest}.")


def test_a_mini_batch_need_not_divide_over_ranks():
    sizes = BatchSizes(prompts_per_step=32, group_size=6, mini_batch_size=6)
    plan = BatchPlan(sizes, world_size=4)
    assert len(plan.mini_batches(192, 0, seed=0)[0]) == 6
    assert sorted(len(plan.passes(range(6), [5] * 6)[rank][0].indices) for rank in range(4)) == [1, 1, 2, 2]


def test_ranks_that_hold_different_rows_may_be_fewer():
    """8 processes generate; 2 groups of 4 train."""
    plan = BatchPlan(BatchSizes(prompts_per_step=8, group_size=2, mini_batch_size=2), 8, data_size=2, sequence_size=4)
    assert len(plan.passes(range(16), [5] * 16)[1][0].indices) == 8
    with pytest.raises(ConfigError, match="divide over 8 ranks"):
        BatchPlan(BatchSizes(prompts_per_step=4), 8, data_size=2, sequence_size=4)


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


@pytest.mark.parametrize("key", ["max_tokens_per_gpu", "max_tokens_per_gpu_forward"])
def test_both_micro_batch_sizes(key):
    assert refusal(micro_batch_size_per_gpu=4, **{key: 1000}) == (
        f"model.batch.micro_batch_size_per_gpu and model.batch.{key} are both set: keep one."
    )


@pytest.mark.parametrize("key", ["max_tokens_per_gpu", "max_tokens_per_gpu_forward"])
def test_token_budget_below_the_longest_sequence(key):
    sizes = BatchSizes(**{"max_tokens_per_gpu": 1000, key: 100})
    BatchPlan(sizes, world_size=1, longest=100)
    with pytest.raises(ConfigError, match=rf"{key} is 100, .* 101 tokens \(longest .*: give at least 101"):
        BatchPlan(sizes, world_size=1, longest=101)
    BatchPlan(sizes, world_size=4, data_size=1, sequence_size=4, longest=400)
    with pytest.raises(ConfigError, match=rf"{key} is 100, .* 401 tokens, shared by 4 ranks .*: give at least 101"):
        BatchPlan(sizes, world_size=4, data_size=1, sequence_size=4, longest=401)
    BatchPlan(BatchSizes(micro_batch_size_per_gpu=1), world_size=1, longest=10**9)


@pytest.mark.parametrize(
    ("longest", "sequence_size", "budget"),
    [
        (None, 1, 16384),
        (8192, 1, 16384),
        (8193, 1, 17 * 1024),
        (40_000, 1, 79 * 1024),
        (8193, 2, 16384),
        (65536, 4, 32768),
        (65537, 4, 33 * 1024),
    ],
)
def test_default_token_budgets(longest, sequence_size, budget):
    plan = BatchPlan(BatchSizes(), sequence_size, data_size=1, sequence_size=sequence_size, longest=longest)
    assert [*plan.max_tokens.values()] == [budget, 2 * budget] * 2


def test_the_forward_budget_follows_that_of_the_update_unless_set():
    assert [*BatchPlan(BatchSizes(max_tokens_per_gpu=100), 1).max_tokens.values()] == [100, 200] * 2
    sizes = BatchSizes(max_tokens_per_gpu=100, max_tokens_per_gpu_forward=50)
    assert [*BatchPlan(sizes, 1).max_tokens.values()] == [100, 50] * 2
    assert [*BatchPlan(BatchSizes(max_tokens_per_gpu_forward=50), 1).max_tokens.values()] == [16384, 50] * 2


def test_a_critic_has_the_policy_s_budgets_or_its_own():
    sizes, kinds = BatchSizes(max_tokens_per_gpu=100), ("update", "forward", "critic_update", "critic_forward")
    plan = BatchPlan(sizes, 1, longest=60, critic_tokens=(60, None))
    assert [plan.max_tokens[kind] for kind in kinds] == [100, 200, 60, 120]
    assert [len(plan.passes(range(4), [25] * 4, kind)[0]) for kind in kinds] == [1, 1, 2, 1]
    plan = BatchPlan(sizes, 1, longest=50, critic_tokens=(None, 50))
    assert [plan.max_tokens[kind] for kind in kinds] == [100, 200, 100, 50]
    assert plan.has_critic_budget
    with pytest.raises(ConfigError, match=r"model\.critic\.max_tokens_per_gpu is 60, .*: give at least 61"):
        BatchPlan(sizes, 1, longest=61, critic_tokens=(60, None))
    with pytest.raises(ConfigError, match=r"model\.critic\.max_tokens_per_gpu_forward is 60, .*: give at least 61"):
        BatchPlan(sizes, 1, longest=61, critic_tokens=(None, 60))
    with pytest.raises(ConfigError, match=r"size_per_gpu and model\.critic\.max_tokens_per_gpu are both set"):
        BatchPlan(BatchSizes(micro_batch_size_per_gpu=4), 1, critic_tokens=(60, None))


def test_forward_only_passes_have_rows_of_their_own_or_those_of_updates():
    kinds = ("update", "forward", "critic_update", "critic_forward")
    plan = BatchPlan(BatchSizes(micro_batch_size_per_gpu=2, micro_batch_size_per_gpu_forward=8), 1)
    assert [len(plan.passes(range(8), [25] * 8, kind)[0]) for kind in kinds] == [4, 1, 4, 1]
    rows = {name: value for name, value, _ in plan.table_rows()}
    assert (rows["update pass"], rows["forward-only pass"]) == ("2 completions", "8 completions")
    plan = BatchPlan(BatchSizes(micro_batch_size_per_gpu=2), 1)
    assert [len(plan.passes(range(8), [25] * 8, kind)[0]) for kind in kinds] == [4] * 4
    assert refusal(micro_batch_size_per_gpu_forward=8).endswith("per_gpu is not: set both.")


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


@given(num_items=st.integers(0, 40), world_size=st.integers(1, 8))
def test_rank_shares_partition_in_order(num_items, world_size):
    items = list(range(num_items))
    shares = [rank_share(items, rank, world_size) for rank in range(world_size)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_printed_plan_names_what_will_run():
    plan = BatchPlan(BatchSizes(prompts_per_step=8, group_size=4, mini_batch_size=16), world_size=2, longest=8193)
    assert plan.table_rows() == [
        ("data-parallel ranks", "2", "train on different completions"),
        ("prompts a step", "8", "4 an engine"),
        ("completions a step", "32", "groups of 4"),
        ("mini-batch", "16", "completions, over all ranks"),
        ("optimizer steps", "2 a step", "1 epoch(s) x 2"),
        ("update pass", "17,408 tokens", "at most, forward and backward of a rank"),
        ("forward-only pass", "34,816 tokens", "at most, where nothing is trained"),
        ("old_logprobs", "computed", "several optimizer steps per rollout"),
    ]


def test_the_printed_plan_of_other_sizes():
    def value(name, *args):
        return next((value for key, value, _ in BatchPlan(*args).table_rows() if key == name), None)

    by_count = BatchSizes(prompts_per_step=4, micro_batch_size_per_gpu=3)
    assert value("update pass", by_count, 2) == value("forward-only pass", by_count, 2) == "3 completions"
    assert value("sequence ranks", by_count, 4, 2, 2) == "2"
    assert value("data-parallel ranks", by_count, 4, 2, 2) == "2"
    assert value("sequence ranks", by_count, 2) is None


def test_attention_cost_counts_what_the_matrices_have():
    """Against parameters of real blocks: L H d / P."""
    for config, model_class in (
        (
            LlamaConfig(hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2),
            LlamaForCausalLM,
        ),
        (Qwen3Config(hidden_size=32, intermediate_size=96, num_attention_heads=4, head_dim=16), Qwen3ForCausalLM),
    ):
        config.num_hidden_layers = 3
        config.layer_types = None if config.model_type == "llama" else ["full_attention"] * 3
        with torch.device("meta"):
            model = model_class(config)
        matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        assert attention_cost(config) == pytest.approx(3 * config.num_attention_heads * head_dim / matrices)


def test_attention_cost_of_other_models():
    """Qwen3 1.7B as its card has it; experts count as often as a token meets them; windows do not grow."""
    qwen = Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    assert attention_cost(qwen) == pytest.approx(28 * 2048 / 1.41e9, rel=0.01)  # 1.4B without embeddings
    mixtral = MixtralConfig()
    assert attention_cost(mixtral) == pytest.approx(4096 / (2 * 4096 * 128 * 40 + 3 * 4096 * 2 * 14336))
    assert attention_cost(GPT2Config()) == pytest.approx(768 / (4 * 768**2 + 3 * 768 * 4 * 768))
    qwen.layer_types = ["full_attention"] * 7 + ["sliding_attention"] * 21
    assert attention_cost(qwen) == pytest.approx(7 * 2048 / 1.41e9, rel=0.01)
    assert attention_cost(MambaConfig()) == 0  # to be refused when it is built


def test_the_printed_plan_says_when_old_logprobs_are_computed():
    def row(reason, **sizes):
        plan = BatchPlan(BatchSizes(prompts_per_step=4, group_size=2, **sizes), 1)
        return next(rest for name, *rest in plan.table_rows(reason) if name == "old_logprobs")

    assert row(None) == ["skipped", "exactly on-policy: the current logprobs"]
    assert row("for the values") == ["computed", "for the values"]
    assert row("for the values", num_epochs=2) == ["computed", "several optimizer steps per rollout"]
