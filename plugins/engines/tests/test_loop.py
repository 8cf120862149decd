"""Calls in the loop of an engine, and requests that are coroutines there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from rlplug_engines.colocated import EngineLoop, EngineStats, LoopRequests, RunningRequest, loop_requests

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.types import Completion, Request, SamplingParams

SPEC = PolicySpec("folder", torch.float32, eos_token_ids=(1,), pad_token_id=0, max_context=100)


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    loop = EngineLoop("Counter")
    yield loop
    loop.close()


class Engine:
    """Repeats the last token of a prompt; a prompt that ends with 0 waits until it is stopped, one with 9 fails."""

    def __init__(self) -> None:
        self.prompts: list[Sequence[int]] = []
        self.stopped: set[str] = set()

    async def generate(self, name: str, prompt_ids: Sequence[int], arguments: Mapping[str, Any]) -> int:
        self.prompts.append(prompt_ids)
        while prompt_ids[-1] == 0 and name not in self.stopped:
            await asyncio.sleep(0.01)
        if prompt_ids[-1] == 9:
            raise ValueError("nine")
        if prompt_ids[-1] == 8:
            raise RunError("eight cannot be")
        return prompt_ids[-1]

    async def abort(self, names: Sequence[str]) -> None:
        self.stopped |= set(names)


class Requests(LoopRequests[int]):
    engine = "Counter"

    def arguments(self, running: RunningRequest) -> dict[str, Any]:
        return {"max_tokens": running.max_tokens}

    def completion(self, running: RunningRequest, output: int) -> Completion:
        return Completion(running.request.request_id, (output,), (-1.0,), "length", self.version)


def made(loop: EngineLoop, *engines: Engine) -> Requests:
    return Requests(loop, engines, SPEC, 100, EngineStats(4, 0, observes_scheduler=False), deadline_s=30.0)


def requests(*last: int) -> list[Request]:
    return [Request(f"r{number}", (5, token), seed=number) for number, token in enumerate(last)]


def test_calls_run_at_once_and_return_in_order(loop: EngineLoop) -> None:
    barrier = asyncio.Barrier(2)

    async def meet(value: int) -> int:
        await barrier.wait()
        return value

    assert loop.run_all([meet(1), meet(2)], "meet", 10.0) == [1, 2]


def test_a_call_that_fails_or_hangs_is_a_fault_that_names_it(loop: EngineLoop) -> None:
    async def fail(problem: Exception) -> None:
        raise problem

    with pytest.raises(EngineFault, match=r"Counter failed at 'add': ValueError: no number"):
        loop.run_all([fail(ValueError("no number"))], "add", 10.0)
    with pytest.raises(EngineFault, match=r"Counter failed at 'add': TimeoutError"):  # its own, and no deadline
        loop.run_all([fail(TimeoutError())], "add", 10.0)
    with pytest.raises(ConfigError, match="key"):
        loop.run_all([fail(ConfigError("key"))], "add", 10.0)
    with pytest.raises(EngineFault, match=r"Counter did not answer 'add' within 0\.05 s"):
        loop.run_all([asyncio.sleep(10.0)], "add", 0.05)


def test_a_closed_loop_gives_up_what_runs() -> None:
    loop = EngineLoop("Counter")
    threads, work = threading.active_count(), loop.spawn(asyncio.sleep(60.0))
    loop.close()
    loop.close()
    assert loop.is_closed
    assert work.cancelled()
    assert threading.active_count() == threads - 1


def test_requests_go_to_engines_in_turn(loop: EngineLoop) -> None:
    first, second = Engine(), Engine()
    tracker = made(loop, first, second)
    completions = tracker.generate(requests(2, 3, 4), SamplingParams(4))
    assert [completion.token_ids.tolist() for completion in completions] == [[2], [3], [4]]
    assert (first.prompts, second.prompts) == ([(5, 2), (5, 4)], [(5, 3)])


def test_submitted_requests_are_stopped_in_their_engine_alone(loop: EngineLoop) -> None:
    first, second = Engine(), Engine()
    tracker = made(loop, first, second)
    tracker.submit(requests(0, 0), SamplingParams(4))
    tracker.abort(["r1"])
    assert [completion.request_id for completion in tracker.collect(10.0)] == ["r1"]
    assert (len(first.stopped), len(second.stopped)) == (0, 1)
    tracker.abort(["r0"])
    tracker.wait_until_idle()
    assert [completion.request_id for completion in tracker.collect(0.0)] == ["r0"]


def test_a_failure_is_a_fault_and_a_refusal_is_not(loop: EngineLoop) -> None:
    with pytest.raises(EngineFault, match="request r0: ValueError: nine"):
        made(loop, Engine()).generate(requests(9), SamplingParams(4))
    with pytest.raises(RunError, match="eight cannot be") as refusal:
        made(loop, Engine()).generate(requests(8), SamplingParams(4))
    assert not isinstance(refusal.value, EngineFault)


def test_waiting_for_requests_ends(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_requests, "IDLE_S", 0.05)
    monkeypatch.setattr(loop_requests, "WAIT_S", 0.01)
    tracker, began = made(loop, Engine()), time.perf_counter()
    tracker.submit(requests(0), SamplingParams(4))
    with pytest.raises(EngineFault, match="1 requests still run"):
        tracker.wait_until_idle()
    assert time.perf_counter() - began < 5.0
