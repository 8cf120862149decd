"""Phases of the loop that need no trainer."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from rlplug_algos.dapo import DAPO
from rlplug_rewards.text import ExactMatch

from rlplug.config import Limits
from rlplug.errors import RunError
from rlplug.models.config import ModelConfig
from rlplug.module import RLModule
from rlplug.training.batch_plan import BatchSizes
from rlplug.training.samples.selection import GroupSelection
from rlplug.types import Prompt, RewardError, Rollout, Sample


def group(number: int, *rewards: float) -> list[Sample]:
    """Return the samples of a prompt; NaN is an error."""
    return [
        Sample(
            prompt=Prompt(uid=str(number), token_ids=(1,), text="a"),
            group=number,
            token_ids=(1, 2),
            response_mask=(False, True),
            rollout_logprobs=(0.0, -1.0),
            completion="b",
            finish_reason="stop",
            policy_version=0,
            rewards={"exactmatch": RewardError("no") if math.isnan(reward) else reward},
            reward=reward,
        )
        for reward in rewards
    ]


def test_reward_errors_are_a_share_of_the_step_and_not_of_a_refill(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 of 20 samples failed, in a refill of 4; the limit is 10 %."""
    alone = SimpleNamespace(gather=list, gather_arrays=lambda array: array)
    monkeypatch.setattr(RLModule, "strategy", alone)
    monkeypatch.setattr(RLModule, "data", SimpleNamespace(train_stream=SimpleNamespace(sources=())))
    module: Any = RLModule(
        policy=ModelConfig("x"),
        algorithm=DAPO(),
        rewards=[ExactMatch()],
        batch=BatchSizes(prompts_per_step=4, group_size=4),
        limits=Limits(max_reward_error_share=0.1),
    )
    module.groups = GroupSelection(module.config.algorithm, 4, module.source, alone.gather_arrays)
    first = [sample for number in range(3) for sample in group(number, 0.0, 0.0, 1.0, 1.0)] + group(3, 0, 0, 0, 0)
    rollout = module.filter_groups(Rollout(), first)
    rollout = module.filter_groups(rollout, group(4, 0.0, 1.0, 1.0, math.nan))
    assert rollout.num_groups == 4
    with pytest.raises(RunError, match="4 of 24 samples"):
        module.filter_groups(rollout, group(5, 0.0, math.nan, math.nan, math.nan))
