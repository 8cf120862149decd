"""The queue's rules: no group too old, lost or trained twice, and no step that waits for ever, whatever happens."""

from __future__ import annotations

import pytest
import torch
from group_queue_cases import run_case
from hypothesis import given, settings
from hypothesis import strategies as st
from rlplug_async.group_queue import GroupQueue
from rlplug_async.source import PartialSource

from rlplug.errors import ConfigError
from rlplug.interfaces import Placement
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.ranks import EngineRanks
from rlplug.rollout.source import RolloutRequest, RolloutSource
from rlplug.types import Completion, Prompt, SamplingParams

RANKS = EngineRanks(Placement(torch.device("cpu"), 0, 1), 1)


@settings(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_no_group_is_too_old_lost_or_trained_twice_and_no_step_hangs(rng):
    run_case(rng)


def test_a_step_waits_for_groups_that_would_grow_too_old():
    queue = GroupQueue(groups_per_step=1, max_open=2, max_staleness=1)
    assert [queue.start(1, num_engines=1).number for _ in range(2)] == [0, 1]
    assert queue.choose(1, 1, {1}) == [1]
    queue.close([1])
    queue.start(2, num_engines=1)
    assert queue.choose(1, 2, {2}) is None  # the new group is complete, and the older one has no later step
    assert queue.choose(1, 2, {0, 2}) == [0]


def test_a_group_starts_on_the_engine_with_the_fewest_incomplete_ones():
    queue = GroupQueue(groups_per_step=4, max_open=4, max_staleness=None)
    assert [queue.start(0, num_engines=2).engine for _ in range(3)] == [0, 1, 0]
    queue.complete([0, 2])
    assert queue.start(0, num_engines=2).engine == 0
    assert queue.choose(3, 0) == [0, 2]  # without a bound a step takes what there is


def test_a_resume_with_a_smaller_bound_is_refused_where_groups_would_wait_for_ever():
    state = PartialSource(PartialRollout(over_provisioning=5, max_staleness=4), 1)
    prompts = [Prompt(str(number), (1,), "") for number in range(5)]
    state.start_groups(RolloutRequest(prompts, 1, SamplingParams(4), "0/1", 0), RANKS)
    saved, by_uid = state.state_dict(list), {prompt.uid: prompt for prompt in prompts}
    limits = {"version": 0, "max_new_tokens": 4, "turns": TurnOptions()}
    state.load_state_dict(saved, by_uid, **limits)
    smaller = PartialSource(PartialRollout(over_provisioning=2, max_staleness=2), 1)
    with pytest.raises(ConfigError, match=r"5 groups in flight.*max_staleness 2 with model\.batch\.prompts_per_step 1"):
        smaller.load_state_dict(saved, by_uid, **limits)
    with pytest.raises(ConfigError, match=r"5 groups in flight, and model\.partial_rollout is not set"):
        RolloutSource().load_state_dict(saved, by_uid, **limits)


def completion(trajectory, num_tokens):
    return Completion(trajectory.request_id, [5] * num_tokens, [-1.0] * num_tokens, "length", 0)


def test_a_resume_with_shorter_limits_or_without_the_prompts_is_refused():
    """It catches requests for no tokens, or fewer, and a prompt that a run cannot name."""
    prompts = [Prompt(str(number), (1,), "") for number in range(2)]
    state = PartialSource(PartialRollout(max_tokens_per_step=3), 2)
    state.start_groups(RolloutRequest(prompts, 1, SamplingParams(4), "0/1", 0), RANKS)
    cut, ended = state.all_trajectories
    cut.add_completion(completion(cut, 3), ends_turn=False)
    ended.add_completion(completion(ended, 5), ends_turn=True)
    ended.finish_reason = "length"
    # ranks that share an engine have the same groups
    saved, by_uid = state.state_dict(lambda own: own + own), {prompt.uid: prompt for prompt in prompts}

    def load(max_new_tokens=5, max_tokens_per_turn=4, prompts=by_uid):
        turns = TurnOptions(max_tokens_per_turn=max_tokens_per_turn)
        state.load_state_dict(saved, prompts, 0, max_new_tokens, turns)

    load()
    assert [len(each.token_ids) for each in state.all_trajectories] == [4, 6]
    with pytest.raises(ConfigError, match=r"model\.sampling\.max_new_tokens is 4, .* in flight that need 5"):
        load(max_new_tokens=4)
    with pytest.raises(ConfigError, match=r"model\.turns\.max_tokens_per_turn is 3, .* in flight that need 4"):
        load(max_tokens_per_turn=3)
    with pytest.raises(ConfigError, match=r"1 prompts that data\.train has not any more, such as '1'"):
        load(prompts={"0": prompts[0]})
