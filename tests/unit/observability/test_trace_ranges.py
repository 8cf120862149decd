"""Ranges of phases and engine calls, as torch's profiler records them, and nothing when none asks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rlplug.observability.phase_timer import PhaseTimer, ranges_made_by, trace_range
from rlplug.rollout.engine_states import EngineStateMachine

CPU = torch.device("cpu")


def generate_within_a_phase() -> None:
    life = EngineStateMachine("engine", CPU)
    with PhaseTimer(stall_s=60).phase("rollout"):
        for call in ("start", "update_weights", "generate"):
            with life.calls(call):
                torch.zeros(1)


def ranges_in_a_trace() -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, ranges_made_by(record_function):
        generate_within_a_phase()
    return [event.name for event in profiler.events() if event.name.startswith("rlplug/")]


def test_phases_and_engine_calls_are_ranges_of_the_profile():
    assert sorted(ranges_in_a_trace()) == [
        *("rlplug/engine/generate", "rlplug/engine/start", "rlplug/engine/update_weights"),
        "rlplug/rollout",
    ]


def test_without_a_profiler_nothing_is_recorded():
    ranges_in_a_trace()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        generate_within_a_phase()
    assert not [event.name for event in profiler.events() if event.name.startswith("rlplug/")]
    assert trace_range("update") is trace_range("rollout")  # nothing is made either


def test_an_error_ends_the_ranges():
    names: list[str] = []

    def make(name: str) -> AbstractContextManager[None]:
        names.append(name)
        return nullcontext()

    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), ranges_made_by(make), trace_range("update"):
        fail()
    with trace_range("publish"):
        pass
    assert names == ["rlplug/update"]
