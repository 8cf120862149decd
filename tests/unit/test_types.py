"""The records: how samples become tensors, and what sampling refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlplug.errors import ConfigError
from rlplug.types import Prompt, RewardError, Rollout, Sample, SamplingParams, StepBatch, groups_of

PAD = 99


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


def test_ragged_samples_are_padded_on_the_right():
    batch = StepBatch.from_samples(RAGGED, PAD).padded
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, PAD, PAD], [6] + [PAD] * 4, [6, 1] + [PAD] * 3]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 1, 1], [0] * 5, [0] * 5, [0] * 5]
    assert batch.rollout_logprobs.tolist() == [[0, 0, -1, -2, -3], [0] * 5, [0] * 5, [0, -1, 0, 0, 0]]
    assert batch.group_index.tolist() == [7, 7, 8, 8]
    assert batch.truncated.tolist() == [False] * 4
    assert (batch.num_sequences, batch.lengths) == (4, [5, 3, 1, 2])
    kinds = {name: tensor.dtype for name, tensor in batch.tensors().items()}
    assert kinds == {
        "input_ids": torch.int64,
        "attention_mask": torch.bool,
        "response_mask": torch.bool,
        "rollout_logprobs": torch.float32,
        "rewards": torch.float32,
        "reward_valid": torch.bool,
        "group_index": torch.int64,
        "policy_versions": torch.int32,
        "truncated": torch.bool,
    }


def test_failed_reward_neither_counts_nor_trains():
    batch = StepBatch.from_samples(RAGGED, PAD).padded
    assert batch.rewards.tolist() == [0.5, -1.0, 0.0, 0.0]
    assert batch.reward_valid.tolist() == [True, True, True, False]
    assert not batch.response_mask[3].any()
    assert RAGGED[3].errors == {"r": RewardError("late")}


def test_one_token():
    batch = StepBatch.from_samples([RAGGED[2]], PAD).padded
    assert batch.input_ids.tolist() == [[6]]
    assert not batch.response_mask.any()


def test_select_takes_rows_in_order_and_cuts_to_the_longest():
    batch = StepBatch.from_samples(RAGGED, PAD).replace(advantages=torch.arange(20.0).view(4, 5))
    chosen = batch.select([3, 1])
    assert chosen.input_ids.tolist() == [[6, 1, PAD], [1, 2, 3]]
    assert chosen.advantages.tolist() == [[15, 16, 0], [5, 6, 7]]
    assert chosen.rewards.tolist() == [0.0, -1.0]
    assert chosen.group_index.tolist() == [8, 7]
    assert (chosen.old_logprobs, chosen.lengths) == (None, [2, 3])
    for name, tensor in chosen.tensors().items():
        assert tensor.shape == ((2, 3) if tensor.dim() == 2 else (2,)), name


def test_what_was_padded_and_is_padded_again_is_the_same():
    batch = StepBatch.from_samples(RAGGED, 0).replace(advantages=torch.arange(20.0).view(4, 5)).padded
    for name, tensor in StepBatch.from_padded(batch.replace(policy_versions=None)).padded.tensors().items():
        assert torch.equal(tensor, batch.tensors()[name]), name


def test_a_number_a_sequence_stands_for_its_tokens_that_train():
    batch = StepBatch.from_samples(RAGGED, PAD).replace(advantages=torch.tensor([2.0, 3.0, 4.0, 5.0]))
    assert batch.padded.advantages.tolist() == [[0, 0, 2, 2, 2], [0] * 5, [0] * 5, [0] * 5]
    none = batch.replace(response_mask=torch.zeros(4, dtype=torch.bool))
    assert not none.padded.response_mask.any()
    assert (none.num_tokens.tolist(), batch.num_tokens.tolist()) == ([0] * 4, [3, 0, 0, 0])
    by_token = batch.replace(advantages=torch.ones(4, 5))
    assert by_token.padded.advantages[0].tolist() == [1] * 5
    assert "advantages" not in by_token.per_sequence


@pytest.mark.parametrize(("name", "shape"), [("advantages", (3,)), ("rewards", (4, 5)), ("values", (4, 6))])
def test_replace_refuses_other_shapes(name, shape):
    with pytest.raises(ValueError, match=f"{name} has the shape"):
        StepBatch.from_samples(RAGGED, PAD).replace(**{name: torch.zeros(shape)})


def test_a_rank_without_samples_has_a_batch():
    batch = StepBatch.from_samples([], PAD, no_experts=np.empty((0, 3, 2), np.int8))
    assert batch.padded.input_ids.shape == (0, 1)
    assert batch.padded.routed_experts.shape == (0, 3, 2)
    assert batch.num_tokens.tolist() == []


def test_replace_leaves_the_original():
    batch = StepBatch.from_samples(RAGGED, PAD).padded
    values = torch.ones(4, 5)
    assert torch.equal(batch.replace(values=values).values, values)
    assert batch.values is None
    assert "values" not in batch.tensors()


def test_map_changes_every_tensor():
    batch = StepBatch.from_samples(RAGGED, PAD).padded.map(lambda tensor: tensor.to("meta"))
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
