"""The records: how samples become tensors, and what sampling refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlplug.errors import ConfigError
from rlplug.types import Prompt, RewardError, Rollout, Sample, SamplingParams, StepBatch, groups_of


def sample_of(prompt, completion, group=0, reward=1.0, rewards=None):
    """Token ids as given; the completion's tokens have logprobs -1, -2, ..."""
    return Sample(
        prompt=Prompt(uid=f"p{group}", token_ids=tuple(prompt), text=""),
        group=group,
        token_ids=(*prompt, *completion),
        response_mask=(False,) * len(prompt) + (True,) * len(completion),
        rollout_logprobs=(0.0,) * len(prompt) + tuple(-1.0 - i for i in range(len(completion))),
        completion="",
        finish_reason="stop",
        policy_version=0,
        rewards={"r": reward} if rewards is None else rewards,
        reward=reward,
    )


RAGGED = [
    sample_of([1, 2], [3, 4, 5], group=7, reward=0.5),
    sample_of([1, 2, 3], [], group=7, reward=-1.0),
    sample_of([6], [], group=8, reward=0.0),
    sample_of([6], [1], group=8, reward=math.nan, rewards={"r": RewardError("late"), "s": 1.0}),
]


def test_ragged_samples_are_end_to_end():
    batch = StepBatch.from_samples(RAGGED)
    assert batch.per_token["input_ids"].tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6, 6, 1]
    assert batch.per_token["response_mask"].nonzero()[0].tolist() == [2, 3, 4]
    assert batch.per_token["rollout_logprobs"].tolist() == [0, 0, -1, -2, -3, 0, 0, 0, 0, 0, -1]
    assert batch.lengths.tolist() == [5, 3, 1, 2]
    assert (batch.group_index.tolist(), batch.truncated.tolist()) == ([7, 7, 8, 8], [False] * 4)


def test_the_tokens_that_train():
    tokens = StepBatch.from_samples(RAGGED).tokens
    assert (tokens.num_sequences, tokens.num_tokens.tolist()) == (4, [3, 0, 0, 0])
    assert tokens.token_ids.tolist() == [3, 4, 5]
    assert tokens.sequence_index.tolist() == [0, 0, 0]
    assert tokens.rollout_logprobs.tolist() == [-1, -2, -3]
    kinds = {name: tensor.dtype for name, tensor in tokens.tensors().items()}
    assert kinds == {
        "num_tokens": torch.int64,
        "sequence_index": torch.int64,
        "token_ids": torch.int64,
        "rollout_logprobs": torch.float32,
        "rewards": torch.float32,
        "reward_valid": torch.bool,
        "group_index": torch.int64,
        "truncated": torch.bool,
        "policy_versions": torch.int32,
    }


def test_failed_reward_neither_counts_nor_trains():
    batch = StepBatch.from_samples(RAGGED)
    assert batch.rewards.tolist() == [0.5, -1.0, 0.0, 0.0]
    assert batch.reward_valid.tolist() == [True, True, True, False]
    assert batch.num_tokens[3] == 0
    assert RAGGED[3].errors == {"r": RewardError("late")}


def test_a_first_token_never_trains():
    """A prompt of no tokens: nothing predicts the first token of its completion."""
    batch = StepBatch.from_samples([sample_of([], [4, 5]), sample_of([1], [4])])
    assert batch.per_token["response_mask"].tolist() == [False, True, False, True]


TWO = [sample_of([1, 2], [3, 4], group=1, reward=0.5), sample_of([9], [8, 7, 6], group=2, reward=2.0)]


def test_select_takes_rows_in_order():
    batch = StepBatch.from_samples(TWO).replace(values=torch.arange(5.0)).select([1, 0, 1])
    assert batch.per_token["input_ids"].tolist() == [9, 8, 7, 6, 1, 2, 3, 4, 9, 8, 7, 6]
    assert batch.tokens.values.tolist() == [2, 3, 4, 0, 1, 2, 3, 4]
    assert (batch.rewards.tolist(), batch.group_index.tolist()) == ([2.0, 0.5, 2.0], [2, 1, 2])
    assert StepBatch.from_samples(TWO).select([]).num_sequences == 0


def test_a_number_a_sequence_stands_for_its_tokens_that_train():
    batch = StepBatch.from_samples(TWO).with_advantages(torch.tensor([2.0, 3.0]))
    assert batch.tokens.advantages.tolist() == [2, 2, 3, 3, 3]
    assert batch.spread(torch.tensor([5, 6])).tolist() == [5, 5, 6, 6, 6]
    fewer = batch.replace(response_mask=torch.tensor([True, False, False, True, True]))
    assert fewer.tokens.advantages.tolist() == [2, 3, 3]
    assert fewer.tokens.token_ids.tolist() == [3, 7, 6]
    assert batch.replace(advantages=torch.tensor([1.0, 0.0])).tokens.advantages.tolist() == [1, 1, 0, 0, 0]
    by_token = batch.replace(advantages=None).replace(advantages=torch.arange(5.0))
    assert by_token.advantages.tolist() == by_token.tokens.advantages.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("name", "size"), [("rewards", 5), ("values", 2), ("response_mask", 4)])
def test_replace_refuses_other_shapes(name, size):
    with pytest.raises(ValueError, match=rf"{name} has the shape \[{size}\]"):
        StepBatch.from_samples(TWO).replace(**{name: torch.zeros(size)})


def test_sums_and_a_padded_view():
    tokens = StepBatch.from_samples([TWO[0], RAGGED[1], TWO[1]]).tokens
    values = torch.arange(5.0, requires_grad=True)
    assert tokens.sums(values).tolist() == [1, 0, 9]
    (tokens.sums(values) * torch.tensor([1.0, 5.0, 2.0])).sum().backward()
    assert values.grad.tolist() == [1, 1, 2, 2, 2]
    assert tokens.padded(values, fill=-1).tolist() == [[0, 1, -1], [-1, -1, -1], [2, 3, 4]]


def test_a_rank_without_samples_has_a_batch():
    batch = StepBatch.from_samples([], no_experts=np.empty((0, 3, 2), np.int8))
    assert batch.per_token["routed_experts"].shape == (0, 3, 2)
    assert batch.num_tokens.tolist() == []
    assert batch.tokens.sums(torch.zeros(0)).tolist() == []
    assert batch.tokens.padded(torch.zeros(0)).shape == (0, 0)


def test_replace_leaves_the_original():
    batch = StepBatch.from_samples(TWO).tokens
    values = torch.ones(5)
    assert torch.equal(batch.replace(values=values).values, values)
    assert batch.values is None
    assert "values" not in batch.tensors()


def test_map_changes_every_tensor():
    batch = StepBatch.from_samples(TWO).tokens.map(lambda tensor: tensor.to("meta"))
    assert {tensor.device.type for tensor in batch.tensors().values()} == {"meta"}


def test_groups_keep_the_order_of_samples():
    assert groups_of(RAGGED) == [tuple(RAGGED[:2]), tuple(RAGGED[2:])]
    assert groups_of(()) == []


def test_a_rollout_grows_group_by_group():
    seven, eight = tuple(RAGGED[:2]), tuple(RAGGED[2:])
    nine = (sample_of([1], [2], group=9),)
    rollout = Rollout().with_group(seven, seven[1:]).with_group(eight, ()).with_surplus(nine)
    assert rollout == Rollout(samples=seven[1:], rejected=(seven[0], *eight), surplus=nine)


def test_a_sample_can_be_chosen_twice_and_an_equal_one_left_out():
    group = (sample_of([1], [2]), sample_of([1], [2]))
    rollout = Rollout().with_group(group, (group[0], group[0]))
    assert len(rollout.samples) == 2
    assert len(rollout.rejected) == 1
    assert rollout.rejected[0] is group[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("top_k", -1),
    ],
)
def test_sampling_refuses(key, value):
    with pytest.raises(ConfigError, match=rf"^sampling\.{key} is {value}: give "):
        SamplingParams(**{key: value})


def test_sampling_knows_what_it_cuts_off():
    assert not SamplingParams(temperature=0.3).is_truncated
    assert SamplingParams(top_p=0.99).is_truncated
    assert SamplingParams(top_k=1).is_truncated
    greedy = SamplingParams(temperature=0)
    assert (greedy.is_greedy, greedy.is_truncated) == (True, True)


def test_sampling_with_extra_options_is_a_key_as_without():
    """Alone catches an unhashable dict: the agent loop and engines sort requests by their sampling."""
    plain, extra = SamplingParams(8), SamplingParams(8, extra={"min_p": 0.1, "logit_bias": {"5": -100}})
    assert {plain: 0, extra: 1}[SamplingParams(8, extra={"min_p": 0.1, "logit_bias": {"5": -100}})] == 1
    assert plain != extra
    with pytest.raises(ConfigError, match=r"sampling\.extra\.top_p is 0\.5: set sampling\.top_p instead"):
        SamplingParams(extra={"top_p": 0.5})
