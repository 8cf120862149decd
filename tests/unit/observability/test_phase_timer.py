"""Phases: what they measure, the stacks of a stall, and Ctrl-C."""

from __future__ import annotations

import sys
import time

import psutil
import pytest
import torch
from forked import run_forked

from rlplug.observability.phase_timer import PhaseTimer
from rlplug.rollout.engine_states import EngineStateMachine
from rlplug.types import GIB

CPU = torch.device("cpu")


def test_times_add_up_over_the_step():
    clock = PhaseTimer(stall_s=60)
    for name, seconds in (("rollout", 0.1), ("update", 0.05), ("rollout", 0.1)):
        with clock.phase(name):
            time.sleep(seconds)
    metrics = clock.pop_metrics()
    assert 0.2 <= metrics["time/rollout"] < 0.4
    assert 0.05 <= metrics["time/update"] < 0.2
    assert metrics["time/step"] == pytest.approx(metrics["time/rollout"] + metrics["time/update"])
    assert set(metrics) == {"time/rollout", "time/update", "time/step", "memory/rollout", "memory/update"}


def test_drain_starts_anew():
    clock = PhaseTimer(stall_s=60)
    with clock.phase("rollout"):
        pass
    clock.pop_metrics()
    assert clock.pop_metrics() == {"time/step": 0}


def test_memory_is_the_largest_of_the_phase_s_ends():
    clock = PhaseTimer(stall_s=60)
    with clock.phase("update"):
        held = torch.ones(64 << 20, dtype=torch.uint8)
        at_end = psutil.Process().memory_info().rss / GIB
    del held
    with clock.phase("update"):
        pass
    assert clock.pop_metrics()["memory/update"] == pytest.approx(at_end, abs=0.03)  # half of what was held


class Card:
    """A GPU, in GiB, of which torch counts as allocated what its own process took, though it may sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, counts_engine: bool) -> None:
        self.used, self.allocated, self.peak, self.counts_engine = 1, 0, 0, counts_engine
        read = {
            "reset_peak_memory_stats": self.reset,
            "memory_allocated": lambda device: self.allocated * GIB,
            "max_memory_allocated": lambda device: self.peak * GIB,
            "mem_get_info": lambda device: ((139 - self.used) * GIB, 139 * GIB),
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
        }
        for name, function in read.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def reset(self, device: torch.device) -> None:
        self.peak = self.allocated

    def takes(self, *changes: int) -> None:
        """Allocate or free, one after another."""
        for change in changes:
            self.used += change
            self.allocated += change
            self.peak = max(self.peak, self.allocated)

    def engine_takes(self, change: int) -> None:
        """Allocate memory of the engine, which torch counts if its process is this one."""
        self.takes(change) if self.counts_engine else self.moves(change)

    def moves(self, change: int) -> None:
        """Let the engine wake or sleep, which torch never counts."""
        self.used += change


@pytest.mark.parametrize(
    ("counts_engine", "expected"),
    [(True, {"sync": 80, "rollout": 83, "update": 52}), (False, {"sync": 10, "rollout": 10, "update": 50})],
    ids=["in this process", "in its own"],
)
def test_peaks_leave_out_what_sleeps_at_the_time(monkeypatch, counts_engine, expected):
    """An engine of 80 GiB, of which 78 sleep, beside weights of 10 GiB that leave in the sync and return after it.

    One peak for the whole phase would add those weights to the engine that made room for them.
    """
    device = torch.device("cuda", 0)
    card, clock = Card(monkeypatch, counts_engine), PhaseTimer(stall_s=60, device=device)
    engine = EngineStateMachine("MyEngine", device, clock.note_asleep)
    with engine.calls("start"):
        card.engine_takes(80)
    with engine.calls("sleep"):
        card.moves(-78)
    card.takes(10)
    for _ in range(2):
        with clock.phase("sync"):
            card.takes(-10)
            with engine.calls("wake_weights"):
                card.moves(14)
            with engine.calls("update_weights"):
                card.takes(1, -1)
            with engine.calls("wake_kv_cache"):
                card.moves(64)
        with clock.phase("rollout"):
            with engine.calls("generate"):
                card.engine_takes(3)
                card.engine_takes(-3)
            with engine.calls("sleep"):
                card.moves(-78)
            card.takes(10)
        with clock.phase("update"):
            card.takes(40, -40)
        metrics = clock.pop_metrics()
        assert {name: metrics[f"memory/{name}"] for name in expected} == expected
    with engine.calls("close"):
        card.engine_takes(-2)
    assert clock.asleep_bytes == 0


def test_a_failed_phase_counts_and_raises():
    clock, entered = PhaseTimer(stall_s=60), []
    clock.on_enter = entered.append

    def fail():
        time.sleep(0.05)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), clock.phase("rewards"):
        fail()
    assert clock.pop_metrics()["time/rewards"] >= 0.05
    assert entered == ["rewards"]


STALL = """
import time, torch
from rlplug.observability.phase_timer import PhaseTimer

def waits_for_the_engine():
    time.sleep(1.0)

clock = PhaseTimer(stall_s=0.4)
for _ in range(4):
    with clock.phase("fast"):
        time.sleep(0.15)
try:
    with clock.phase("failed"):
        raise ValueError
except ValueError:
    pass
time.sleep(0.6)  # no phase
print("before", flush=True)
with clock.phase("rollout"):
    waits_for_the_engine()
print("after", flush=True)
time.sleep(0.6)
"""


def test_a_stall_writes_stacks_again_and_again():
    done = run_forked([sys.executable, "-c", STALL], timeout=60, check=True)
    assert done.stdout == "before\nafter\n"
    assert done.stderr.count("Timeout (0:00:00.400000)!") >= 2  # after 0.4 s, 0.8 s, ... of one phase
    assert done.stderr.count("in waits_for_the_engine") == done.stderr.count("Timeout")  # and of no other
