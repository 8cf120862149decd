"""The ledger's rules: no group too old, lost or trained twice, and no step that waits for ever, whatever happens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import run_ledger_case

from rlplug.errors import ConfigError
from rlplug.interfaces import Placement
from rlplug.rollout.config import PartialRollout
from rlplug.rollout.engines.ranks import EngineRanks
from rlplug.rollout.partial.ledger import GroupLedger
from rlplug.rollout.partial.state import PartialRolloutState, load_partial_rollout
from rlplug.types import Prompt


@settings(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_no_group_is_too_old_lost_or_trained_twice_and_no_step_hangs(rng):
    run_ledger_case(rng)


def test_a_step_waits_for_groups_that_would_grow_too_old():
    ledger = GroupLedger(groups_per_step=1, max_open=2, max_staleness=1)
    assert [ledger.start(1, num_engines=1).number for _ in range(2)] == [0, 1]
    assert ledger.choose(1, 1, {1}) == [1]
    ledger.close([1])
    ledger.start(2, num_engines=1)
    assert ledger.choose(1, 2, {2}) is None  # the new group is complete, and the older one has no later step
    assert ledger.choose(1, 2, {0, 2}) == [0]


def test_a_group_starts_on_the_engine_with_the_fewest_incomplete_ones():
    ledger = GroupLedger(groups_per_step=4, max_open=4, max_staleness=None)
    assert [ledger.start(0, num_engines=2).engine for _ in range(3)] == [0, 1, 0]
    ledger.complete([0, 2])
    assert ledger.start(0, num_engines=2).engine == 0
    assert ledger.choose(3, 0) == [0, 2]  # without a bound a step takes what there is


def test_a_resume_with_a_smaller_bound_is_refused_where_groups_would_wait_for_ever():
    state = PartialRolloutState(PartialRollout(over_provisioning=5, max_staleness=4), 1)
    ranks = EngineRanks(Placement(torch.device("cpu"), 0, 1), 1)
    prompts = [Prompt(str(number), (1,), "") for number in range(5)]
    state.start(prompts, 1, "0/1", 0, ranks)
    saved, by_uid = state.state_dict(list), {prompt.uid: prompt for prompt in prompts}
    load_partial_rollout(state, saved, by_uid, version=0)
    smaller = PartialRolloutState(PartialRollout(over_provisioning=2, max_staleness=2), 1)
    with pytest.raises(ConfigError, match=r"5 groups in flight.*max_staleness 2 with model\.batch\.prompts_per_step 1"):
        load_partial_rollout(smaller, saved, by_uid, version=0)
    with pytest.raises(ConfigError, match=r"5 groups in flight, and model\.partial_rollout is not set"):
        load_partial_rollout(None, saved, by_uid, version=0)
