"""An engine that answers as it is told, and rows as a step has them, for faults of plugins."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlplug.interfaces import Placement, PolicySpec, RolloutEngine
from rlplug.rollout.agent_loop import AgentLoop
from rlplug.rollout.config import TurnOptions
from rlplug.rollout.ranks import EngineRanks
from rlplug.rollout.trajectory import new_trajectories
from rlplug.rollout.turns.trajectory_turns import TurnRules
from rlplug.types import Completion, Prompt, SamplingParams, StepBatch

CPU = torch.device("cpu")
END, VOCAB, LIMIT, VERSION = 1, 50, 4, 7
POLICY = PolicySpec("folder", torch.float32, (END, 2), 0, 100, vocab_size=VOCAB)
LOSS = torch.ones((), requires_grad=True) * 2


class Scripted(RolloutEngine):
    """Answers as it should, and then changes its answer."""

    def __init__(self, change: Any = None, field: str = "", value: Any = None) -> None:
        self.change, self.field, self.value = change, field, value

    def start(self, policy: PolicySpec, placement: Placement) -> None: ...
    def update_weights(self, buckets: Any, version: int) -> Any: ...
    def close(self) -> None: ...

    def generate(self, requests: Any, sampling: SamplingParams) -> Any:
        good = [
            Completion(request.request_id, (5, 6, END), (-0.5, -1.0, 0.0), "stop", VERSION) for request in requests[:-1]
        ]
        good.append(Completion(requests[-1].request_id, (5, 6, 7, 8), (-0.5,) * 4, "length", VERSION))
        if self.field:
            good[0] = dataclasses.replace(good[0], **{self.field: self.value})
        return good if self.change is None else self.change(good)


def run_loop(engine: RolloutEngine) -> list[Any]:
    """Generate three completions and return their trajectories; raise the first fault."""
    trajectories = new_trajectories([Prompt("0", (3, 4), "")], [0], 3, "k")
    ranks = EngineRanks(Placement(CPU, 0, 1), 1, communicates=False)
    sampling = SamplingParams(LIMIT)
    loop = AgentLoop(trajectories, sampling, TurnRules(TurnOptions()), POLICY, VERSION, ranks)
    driver: Any = SimpleNamespace(
        ready_engine=lambda version: contextlib.nullcontext(engine),
        with_restarts=lambda attempt, num_missing: attempt(),
        finish=lambda: None,
    )
    loop.run(driver)
    return list(trajectories)


def rows(num_sequences: int = 2) -> StepBatch:
    """Sequences of 3 and 4 tokens, of which the first is the prompt's."""
    lengths = np.array([3, 4][:num_sequences], np.int64)
    size = int(lengths.sum())
    response = np.ones(size, np.bool_)
    response[lengths.cumsum() - lengths] = False
    return StepBatch(
        lengths=lengths,
        per_sequence={
            "rewards": np.zeros(num_sequences, np.float32),
            "reward_valid": np.ones(num_sequences, np.bool_),
            "group_index": np.zeros(num_sequences, np.int64),
            "truncated": np.zeros(num_sequences, np.bool_),
        },
        per_token={
            "input_ids": np.arange(size, dtype=np.int32),
            "response_mask": response,
            "rollout_logprobs": np.zeros(size, np.float32),
            "policy_versions": np.full(size, VERSION, np.int32),
        },
    )
