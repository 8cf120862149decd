"""Importance weights by the age of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from rlplug.training.mismatch_gate import weights_by_age
from rlplug.types import Prompt, Sample, Segment, StepBatch


def test_weights_are_of_each_tokens_own_age():
    """It catches weights of prompts, of the wrong sign, and tokens counted at the age of their trajectory."""
    sample = Sample(
        prompt=Prompt("a", (1,), ""),
        group=0,
        token_ids=(1, 2, 3, 4),
        response_mask=(False, True, True, True),
        rollout_logprobs=(0.0, -1.0, -1.0, -2.0),
        completion="",
        finish_reason="stop",
        policy_version=3,
        segments=(Segment(1, 3, 3, False), Segment(3, 4, 5, True)),
    )
    trainer = torch.tensor([9.0, -1.0 + math.log(2), -1.0 + math.log(4), -2.0 - math.log(2)])
    metrics = weights_by_age(StepBatch.from_samples([sample]), trainer, policy_version=5, max_age=2)
    wanted = {"weight_mean_0": 0.5, "weight_max_0": 0.5, "token_share_0": 1 / 3}
    wanted |= {"weight_mean_2": 3.0, "weight_max_2": 4.0, "token_share_2": 2 / 3}
    assert metrics == {f"partial/{name}": pytest.approx(value) for name, value in wanted.items()}
