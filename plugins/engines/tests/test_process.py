"""An engine's own process: messages, faults, and what is left when it ends. SGLang's plugin tests requests over it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import ForkedProcess
from processes import runs, wait_until_gone
from rlplug_engines.colocated import EngineProcess

from rlplug.interfaces import EngineFault

COMMAND = (sys.executable, str(Path(__file__).with_name("echo_host.py")))
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that torchrun started."""
    monkeypatch.setenv("RANK", "3")


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    process = EngineProcess("Echo", COMMAND, {}, {}, DEADLINE_S)
    yield process
    process.close()


def outputs(process: EngineProcess, count: int) -> dict[str, tuple[Any, str | None]]:
    found: dict[str, tuple[Any, str | None]] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} came"
        found |= {name: (answer, problem) for name, answer, problem in process.outputs(1.0)}
    return found


def test_a_request_that_fails_keeps_the_others(process: EngineProcess) -> None:
    process.submit([("a", [1, 2], {}), ("b", [3], {"fails": True}), ("c", [4], {})])
    assert outputs(process, 3) == {"a": ([1, 2], None), "b": (None, "ValueError: no such thing"), "c": ([4], None)}


def test_an_abort_ends_one_request_and_the_load_is_told_while_it_runs(process: EngineProcess) -> None:
    """Alone catches a report of the load that fails once, and is the last one."""
    process.loads.clear()
    process.submit([("long", [5], {"is_long": True})])
    assert process.outputs(3.0) == []
    process.abort(["long", "never"])
    assert outputs(process, 1) == {"long": ([5], None)}
    assert (1, 0, 0.25) in process.loads


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fail", "Echo failed at 'fail': RuntimeError: the bucket is bad"),
        ("sleep", r"Echo did not answer 'sleep' within 1 s"),
        ("mislead", "has no attribute 'call_mislead'"),
    ],
)
def test_a_call_that_fails_is_a_fault(process: EngineProcess, name: str, message: str) -> None:
    with pytest.raises(EngineFault, match=message):
        process.call(name, deadline_s=1.0)


@pytest.mark.parametrize(
    ("arguments", "deadline_s", "message"),
    [
        ({"fails": "no such model"}, DEADLINE_S, r"ValueError: no such model.*\n(.|\n)*Traceback"),
        ({"seconds": 60}, 2.0, "was not ready within 2 s"),
    ],
)
def test_a_start_that_fails_leaves_nothing(arguments: dict[str, Any], deadline_s: float, message: str) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(EngineFault, match=message):
        EngineProcess("Echo", COMMAND, {}, arguments, deadline_s)
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before and runs(c.pid)]
    assert not left


def test_a_process_that_dies_is_a_fault_and_the_trainer_keeps_its_own() -> None:
    """Engines end all processes below the one that they are in, and take signals over."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT)]
    method = multiprocessing.get_start_method(allow_none=True)
    environment = dict(os.environ)
    with subprocess.Popen(["sleep", "1000"]) as own:
        process = EngineProcess("Echo", COMMAND, {}, {}, DEADLINE_S)
        child = process.about["max_num_seqs"]
        process.submit([("a", [1], {"dies": True})])
        with pytest.raises(EngineFault, match=r"Echo's process ended, with exit code 7(.|\n)*illegal memory"):
            outputs(process, 1)
        process.close()
        process.close()
        wait_until_gone(child)
        assert runs(own.pid)
        own.kill()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT)]
    assert multiprocessing.get_start_method(allow_none=True) == method
    assert dict(os.environ) == environment


def test_a_trainer_that_dies_takes_the_engine_with_it() -> None:
    code = (
        "import time; from rlplug_engines.colocated import EngineProcess; "
        f"process = EngineProcess('Echo', {COMMAND!r}, {{}}, {{}}, 60); "
        "print(process._process.pid, process.about['max_num_seqs'], flush=True); time.sleep(600)"
    )
    trainer = ForkedProcess([sys.executable, "-c", code])
    try:
        while not trainer.stdout.endswith("\n"):
            assert trainer.poll() is None, trainer.stdout
            time.sleep(0.05)
        pids = [int(word) for word in trainer.stdout.split()]
        assert len(pids) == 2
        assert all(runs(pid) for pid in pids)
        os.kill(trainer.pid, signal.SIGKILL)
        for pid in pids:
            wait_until_gone(pid)
    finally:
        trainer.kill()
