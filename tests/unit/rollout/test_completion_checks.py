"""Completions that an engine returns, before they become parts of trajectories."""

from __future__ import annotations

import torch

from rlplug.interfaces import PolicySpec
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.rollout.completion_checks import CompletionChecks
from rlplug.rollout.hf_engine import HFRollout
from rlplug.rollout.trajectory import new_trajectories
from rlplug.types import Completion, Prompt

POLICY = PolicySpec("folder", torch.float32, eos_token_ids=(1,), pad_token_id=0, max_context=100)


def test_an_abort_that_comes_with_the_end_token_ends_the_turn():
    """It catches a policy that writes on behind its end token: SGLang looks for an abort before the end token."""
    trajectories = new_trajectories([Prompt("p", (3, 4), "")], [0], 3, "0/1")
    answers = [(5, 1), (5, 6), ()]
    completions = [
        Completion(trajectory.request_id, ids, (-1.0,) * len(ids), "abort", 0)
        for trajectory, ids in zip(trajectories, answers, strict=True)
    ]
    checks = CompletionChecks(lambda _: 8, POLICY, 0)
    running = {trajectory.request_id: trajectory for trajectory in trajectories}
    accepted, fault = checks.accept(PluginCall(HFRollout(), "collect"), completions, running)
    assert fault is None
    assert [completion.finish_reason for _, completion in accepted] == ["stop", "abort", "abort"]
