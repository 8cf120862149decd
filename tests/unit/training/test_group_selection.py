"""When a step draws prompts again."""

from __future__ import annotations

import pytest
from rlplug_algos.dapo import DAPO
from rlplug_async.source import PartialSource

from rlplug.rollout.config import PartialRollout
from rlplug.training.samples.selection import GroupSelection
from rlplug.types import Prompt, Rollout, Sample


def solved(number):
    """Return a group that DAPO rejects."""
    sample = Sample(
        Prompt(str(number), (1,), ""), number, [1, 2], [False, True], [0.0, -1.0], "", "stop", 0, reward=1.0
    )
    return [sample, sample]


@pytest.mark.parametrize("rounds_without", [0, 20])
def test_rounds_that_complete_no_group_are_no_refills(rounds_without):
    """With a partial rollout they bring groups nearer to their end: DAPO has all its refills after them."""
    algorithm = DAPO(correction=None)
    source = PartialSource(PartialRollout(max_tokens_per_step=8), prompts_per_step=2)
    groups = GroupSelection(algorithm, 2, source, lambda array: array)
    rollout, num_refills = Rollout(), -1
    for _ in range(rounds_without):
        assert groups.wants_more(rollout)
        rollout = groups.add(rollout, [])
    while groups.wants_more(rollout):
        rollout, num_refills = groups.add(rollout, solved(num_refills)), num_refills + 1
    assert num_refills == algorithm.max_refills
    assert groups.metrics(rollout)["filter/refills"] == algorithm.max_refills
