"""Phases: what they measure, the stacks of a stall, and Ctrl-C."""

from __future__ import annotations

import sys
import time

import psutil
import pytest
import torch
from forked import run_forked

from rlplug.observability.phase_timer import PhaseTimer
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


@pytest.mark.parametrize("slept", [True, False], ids=["asleep", "woke"])
def test_memory_leaves_out_what_slept_all_the_time(monkeypatch, slept):
    """torch counts 61.5 GiB while vLLM's pool sleeps, and the device shows 7.5."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(61.5 * GIB))
    clock = PhaseTimer(stall_s=60, device=torch.device("cuda", 0))
    before = time.perf_counter()
    clock.asleep_bytes = lambda since: 54 * GIB if slept and since >= before else 0
    with clock.phase("update"):
        pass
    assert clock.pop_metrics()["memory/update"] == (7.5 if slept else 61.5)


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
