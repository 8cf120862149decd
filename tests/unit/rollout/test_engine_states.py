"""The order of an engine's calls: what is legal, what a refusal says, and what sleep must give back."""

from __future__ import annotations

import contextlib

import pytest
import torch

from rlplug.errors import RunError
from rlplug.interfaces.rollout import EngineFault
from rlplug.rollout.engine_states import MEASURED, EngineStateMachine
from rlplug.types import GIB

CPU = torch.device("cpu")
PATHS = {
    "new": [],
    "stale": ["start"],
    "ready": ["start", "update_weights"],
    "asleep": ["start", "update_weights", "sleep"],
    "loading": ["start", "sleep", "wake_weights"],
    "synced": ["start", "sleep", "wake_weights", "update_weights"],
    "broken": ["start", "a fault"],
    "closed": ["start", "close"],
}
"""Calls that lead to each state."""
CALLS = ["start", "update_weights", "generate", "sleep", "wake_weights", "wake_kv_cache"]
"""All but ``close``, which is legal everywhere."""
LEGAL = {
    "new": {"start"},
    "stale": {"update_weights", "sleep"},
    "ready": {"update_weights", "generate", "sleep"},
    "asleep": {"wake_weights"},
    "loading": {"update_weights"},
    "synced": {"wake_kv_cache"},
    "broken": set(),
    "closed": {"start"},
}
"""What may follow in each state, beside ``close``."""


def call_all(life: EngineStateMachine, calls: list[str]) -> list[str]:
    """Make calls that do nothing; return the state after each."""
    states = []
    for call in calls:
        if call == "a fault":
            fail(life, "update_weights", EngineFault("it died"))
        else:
            with life.calls(call):
                pass
        states.append(life.state)
    return states


def fail(life: EngineStateMachine, call: str, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, life.calls(call):
        raise error
    assert raised.value is error


def life_in(state: str) -> EngineStateMachine:
    life = EngineStateMachine("MyEngine", CPU)
    call_all(life, PATHS[state])
    assert life.state == state
    return life


# ---- order -----------------------------------------------------------------------------------------------------------


def test_a_run_without_sleep():
    calls = ["start", "update_weights", "generate", "generate", "update_weights", "generate", "close"]
    expected = ["stale", "ready", "ready", "ready", "ready", "ready", "closed"]
    assert call_all(EngineStateMachine("MyEngine", CPU), calls) == expected


def test_a_run_with_sleep_that_starts_again():
    one_step = ["wake_weights", "update_weights", "wake_kv_cache", "generate", "sleep"]
    states = ["loading", "synced", "ready", "ready", "asleep"]
    life = EngineStateMachine("MyEngine", CPU)
    calls = ["start", "sleep", *one_step, *one_step, "close", "close"]
    for _ in range(2):
        assert call_all(life, calls) == ["stale", "asleep", *states, *states, "closed", "closed"]


@pytest.mark.parametrize("state", PATHS)
def test_calls_that_are_legal_in_a_state_and_no_others_reach_the_engine(state):
    for call in CALLS:
        life, reached = life_in(state), False
        with contextlib.suppress(RunError), life.calls(call):
            reached = True
        assert reached == (call in LEGAL[state]), call
        if reached:
            assert life.seconds[call] >= 0
        else:
            assert life.state == state, call
    assert call_all(life_in(state), ["close"]) == ["closed"]


def test_a_refusal_is_nothing_that_a_restart_would_help():
    with pytest.raises(RunError) as refusal, life_in("asleep").calls("generate"):
        pass
    assert not isinstance(refusal.value, EngineFault)


@pytest.mark.parametrize(
    ("state", "call", "message"),
    [
        ("new", "generate", "MyEngine cannot generate now: it was not started: call start first."),
        ("stale", "generate", "it has no weights, or only some of the new ones: call update_weights first."),
        ("asleep", "generate", "it sleeps: wake its weights first."),
        ("asleep", "update_weights", "MyEngine cannot update weights now: it sleeps: wake its weights first."),
        (
            "loading",
            "wake_kv_cache",
            "MyEngine cannot wake kv_cache now: its weights were discarded by sleep(): call update",
        ),
        ("synced", "generate", "its KV cache still sleeps: wake the KV cache first."),
        ("ready", "start", "MyEngine cannot start now: it is ready to generate."),
        ("broken", "generate", "a call of it failed: close it and start it again."),
    ],
)
def test_refusals_say_why(state, call, message):
    with pytest.raises(RunError) as refusal, life_in(state).calls(call):
        pass
    assert message in str(refusal.value)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "call", "after"),
    [
        ("stale", "update_weights", "stale"),
        ("ready", "update_weights", "stale"),  # a part of the new weights may have arrived
        ("loading", "update_weights", "loading"),
        ("ready", "generate", "ready"),
        ("new", "start", "broken"),
        ("asleep", "wake_weights", "broken"),
    ],
)
def test_a_refused_sync_or_request_leaves_an_engine_that_goes_on(state, call, after):
    for error in (RunError("refused"), ConnectionError("gone"), AssertionError()):
        life = life_in(state)
        fail(life, call, error)
        assert life.state == after, error


@pytest.mark.parametrize(("state", "call"), [("ready", "generate"), ("loading", "update_weights"), ("new", "start")])
def test_a_fault_or_an_interrupt_breaks_the_engine_until_it_starts_again(state, call):
    for error in (EngineFault("it died"), KeyboardInterrupt()):
        life = life_in(state)
        fail(life, call, error)
        assert life.state == "broken"
        for other in CALLS:
            with pytest.raises(RunError, match="close it and start it again"), life.calls(other):
                pass
        assert call_all(life, ["close", "start", "update_weights", "generate"])[-1] == "ready"


# ---- memory ----------------------------------------------------------------------------------------------------------


class Device:
    """A device of which an engine takes and gives back memory, in GiB. Others' is on it too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = 7.0
        self.life = EngineStateMachine("MyEngine", CPU)
        monkeypatch.setattr(
            EngineStateMachine, "_bytes_in_use", lambda life, call: int(self.used * GIB) if call in MEASURED else 0
        )

    def calls(self, call: str, change: float = 0.0) -> None:
        with self.life.calls(call):
            self.used += change

    def others_take(self, change: float) -> None:
        self.used += change


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_the_first_sleep_after_start_may_leave_half(device):
    device.calls("start", 10.0)
    device.calls("sleep", -5.0)
    assert device.life.state == "asleep"
    assert device.life.freed_bytes == 5 * GIB


def test_the_first_sleep_after_start_may_come_after_the_first_rollout(device):
    device.calls("start", 10.0)
    device.calls("update_weights")
    device.calls("generate")
    device.others_take(20.0)
    device.calls("sleep", -5.0)
    assert device.life.freed_bytes == 5 * GIB


def test_the_first_sleep_gives_too_little(device):
    device.calls("start", 10.0)
    with pytest.raises(RunError) as error:
        device.calls("sleep", -3.5)
    assert "MyEngine took 10.0 GiB of the device, and gave 3.5 GiB back in its sleep" in str(error.value)
    assert "model.memory.sleep_between_rollouts to false" in str(error.value)
    assert not isinstance(error.value, EngineFault)
    assert device.life.state == "broken"


def test_an_engine_of_libraries_mostly_gives_little_at_its_first_sleep(device):
    device.calls("start", 1.8)  # of vLLM 0.33 with a KV cache of 0.5
    device.calls("sleep", -0.5)
    assert device.life.state == "asleep"


def wake(device: Device) -> None:
    device.calls("wake_weights", 4.0)
    device.calls("update_weights", 0.5)
    device.calls("wake_kv_cache", 6.0)


def test_rounds_give_nine_tenths_of_what_woke(device):
    device.calls("start", 10.0)
    device.calls("sleep", -8.0)
    for _ in range(3):
        wake(device)
        device.others_take(-3.0)
        device.calls("generate", 0.5)
        device.calls("sleep", -9.0)
        assert device.life.freed_bytes == 9 * GIB
    wake(device)
    with pytest.raises(RunError, match=r"took 10\.0 GiB of the device, and gave 8\.5 GiB back"):
        device.calls("sleep", -8.5)


def test_the_first_sleep_after_another_start_may_leave_half(device):
    device.calls("start", 10.0)
    device.calls("sleep", -8.0)
    device.calls("close", -2.0)
    device.calls("start", 10.0)
    device.calls("sleep", -5.0)
    wake(device)
    with pytest.raises(RunError, match=r"gave 5\.0 GiB back"):
        device.calls("sleep", -5.0)


def test_memory_of_a_cpu_is_not_read():
    life = EngineStateMachine("MyEngine", CPU)
    assert call_all(life, ["start", "sleep"]) == ["stale", "asleep"]
    assert life.freed_bytes == 0
