"""The bound on staleness: held whatever order groups end in, with no group lost, and no step that waits for ever."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from rlplug.rollout.config import PartialRollout
from rlplug.rollout.partial.state import PartialRolloutState
from rlplug.types import Prompt

PER_STEP, MOST_REFILLS = 3, 3


@settings(deadline=None)
@given(
    options=st.sampled_from([(1.34, 1), (2.0, 1), (1.5, 2), (3.0, 2), (5.0, 4)]),
    rng=st.randoms(use_true_random=False),
    reject=st.sampled_from([0.0, 0.3, 1.0]),
    num_steps=st.integers(1, 12),
)
def test_no_group_is_too_old_lost_or_trained_twice_and_no_step_hangs(options, rng, reject, num_steps):
    ratio, bound = options
    state = PartialRolloutState(PartialRollout(over_provisioning=ratio, max_staleness=bound), PER_STEP)
    started, left, waited = 0, [], 0
    for step in range(num_steps):
        num_missing = PER_STEP
        for _ in range(MOST_REFILLS):
            prompts = [Prompt(str(started + number), (1,), "") for number in range(state.num_wanted(num_missing))]
            started += len(prompts)
            state.add(prompts, 1, f"0/{step}", step, num_engines=2)
            order = [group for group in state.groups if not group.is_complete]
            rng.shuffle(order)
            while (chosen := state.chosen([], num_missing, step)) is None:
                waited += sum(group.is_complete for group in state.groups) >= num_missing
                order.pop().trajectories[0].finish_reason = "stop"  # IndexError: it would wait for ever
            released = state.release(state.groups, True, num_missing, step, list)
            assert [group.number for group in released] == chosen
            assert len(released) == num_missing
            assert all(step - group.version <= bound for group in released)
            left += [group.trajectories[0].prompt.uid for group in released]
            num_missing -= sum(rng.random() >= reject for _ in released)
            state = reloaded(state)
            if num_missing == 0:
                break
    assert sorted(left + [group.trajectories[0].prompt.uid for group in state.groups], key=int) == [
        str(number) for number in range(started)
    ]


def reloaded(state):
    """Return what a checkpoint makes of a state."""
    loaded = dataclasses.replace(state, groups=[], _key=state._key)
    prompts = {trajectory.prompt.uid: trajectory.prompt for group in state.groups for trajectory in group.trajectories}
    key, number = loaded._key, loaded._next_number
    loaded.load_state_dict(state.state_dict(), prompts)
    loaded._key, loaded._next_number = key, number  # within a step
    return loaded


def test_a_step_waits_for_groups_that_would_grow_too_old():
    state = PartialRolloutState(PartialRollout(over_provisioning=2.0, max_staleness=1), 1)
    prompts = [Prompt(str(number), (1,), "") for number in range(3)]
    state.add(prompts[:2], 1, "0/1", version=1, num_engines=1)
    state.groups[1].trajectories[0].finish_reason = "stop"
    assert [group.number for group in state.release(state.groups, True, 1, 1, list)] == [1]
    state.add(prompts[2:], 1, "0/2", version=2, num_engines=1)
    assert state.chosen([1], 1, version=2) is None  # the new group is complete, and the older one has no later step
    assert state.chosen([0, 1], 1, version=2) == [0]
