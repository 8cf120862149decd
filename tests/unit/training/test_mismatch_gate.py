"""When a difference between the logprobs of engine and trainer stops a run, and when it warns."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from unit.interfaces.checks.seam_cases import CPU, LIMIT, POLICY, VERSION, rows

from rlplug.errors import RunError
from rlplug.interfaces import PolicySpec
from rlplug.training.mismatch_gate import MismatchGate, limit_of
from rlplug.types import SamplingParams


def mismatch(gate: MismatchGate, difference: float, step: int = 1, version: int = VERSION) -> dict[str, float]:
    batch = rows()
    trainer = torch.from_numpy(batch.per_token["rollout_logprobs"] + np.float32(difference))
    return gate.compare(batch, trainer, version, step, is_first_step=step == 1)


def gate_of(policy: PolicySpec = POLICY, every_step: bool = True, **options: Any) -> MismatchGate:
    limit = limit_of(policy, CPU, SamplingParams(LIMIT))
    return MismatchGate("Engine", limit, limit, every_step, options.get("has_old_tokens", False))


@pytest.mark.parametrize(("fault", "step"), [(1e-3, 3), (0.06, 1), (0.047, 2)])
def test_the_gate_stops_float32_at_each_step(fault: float, step: int) -> None:
    """A stale layer, a dropped weight and skipped small changes: each trained on under a limit of 0.1."""
    gate = gate_of()
    for sound in range(1, step):
        mismatch(gate, 5e-7, sound)
    with pytest.raises(RunError, match=rf"step {step}: Engine and the trainer disagree .* gate 0.0001\."):
        mismatch(gate, fault, step)


def test_a_jump_against_the_runs_own_history_is_said_once() -> None:
    gate = gate_of(dataclasses.replace(POLICY, dtype=torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, sound in enumerate((0.004, 0.003, 0.005, 0.004, 0.009, 0.004), start=1):
            mismatch(gate, sound, step)
    with pytest.warns(UserWarning, match="step 7: .* 0.047, maximum 0.047; the median of the last 6 steps is 0.004"):
        mismatch(gate, 0.047, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mismatch(gate, 0.05, 8)


def test_few_tokens_of_the_newest_version_are_no_gate() -> None:
    gate = gate_of(has_old_tokens=True)
    assert mismatch(gate, 0.5)["mismatch/mean"] == pytest.approx(0.5)
    assert mismatch(gate, 0.5, version=VERSION + 1) == {}


@pytest.mark.parametrize(
    ("dtype", "device", "sampling", "limit"),
    [
        (torch.float32, "cpu", {}, 1e-4),
        (torch.float32, "cpu", {"temperature": 0.1}, 1e-3),
        (torch.float32, "cpu", {"top_p": 0.9}, 1e-2),
        (torch.float32, "cuda", {}, 1e-2),
        (torch.bfloat16, "cpu", {"temperature": 0.1}, 0.1),
    ],
)
def test_the_limit_follows_from_the_dtype(dtype: torch.dtype, device: str, sampling: Any, limit: float) -> None:
    policy = dataclasses.replace(POLICY, dtype=dtype)
    assert limit_of(policy, torch.device(device), SamplingParams(4, **sampling)) == pytest.approx(limit)


def test_the_gate_names_the_options_that_the_trainer_does_not_follow() -> None:
    gate = MismatchGate("Engine", 1e-4, 1e-4, True, False, extra={"min_p": 0.1})
    with pytest.raises(RunError, match=r"gate 0.0001\. model\.sampling\.extra \(min_p\) changes .* Look for weights"):
        mismatch(gate, 0.05)
