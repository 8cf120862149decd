"""Requests in engines that are called in an event loop: each request is a coroutine there."""

from __future__ import annotations

import asyncio
import queue
import time
from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from rlplug.errors import RunError
from rlplug.interfaces.rollout import EngineFault, PolicySpec
from rlplug.types import Completion
from rlplug_engines.colocated.loop import EngineLoop
from rlplug_engines.colocated.requests import WAIT_S, EngineRequests, RunningRequest, arrivals
from rlplug_engines.colocated.stats import EngineStats

Output = TypeVar("Output")

IDLE_S: Final = 60.0
"""How long requests that were aborted may take to be gone."""


class LoopEngine(Protocol):
    """An engine of this process, or one elsewhere."""

    def generate(self, name: str, prompt_ids: Sequence[int], arguments: Mapping[str, Any]) -> Awaitable[Any]:
        """Return what is generated for one request."""

    def abort(self, names: Sequence[str]) -> Awaitable[None]:
        """End requests early; each is still returned, with the tokens that it has."""


class LoopRequests(EngineRequests[Output | Exception]):
    """Hands requests to engines in turn. ``Output`` is what an engine returns for a request.

    Args:
        loop: Engines are called in it.
        engines: Those that take requests, the first of which gets the first.
        policy: For the context, and for a subclass.
        context: Of the engines: prompt and completion together, in tokens.
        stats: Counts tokens, and for how long requests ran.
        deadline_s: How long a request may take; a longer one counts as a fault.
    """

    def __init__(
        self,
        loop: EngineLoop,
        engines: Sequence[LoopEngine],
        policy: PolicySpec,
        context: int,
        stats: EngineStats,
        deadline_s: float,
    ) -> None:
        super().__init__(policy, context, stats, deadline_s)
        self._loop = loop
        self._engines = engines
        self._arrived: queue.SimpleQueue[tuple[str, Output | Exception]] = queue.SimpleQueue()

    @abstractmethod
    def arguments(self, running: RunningRequest) -> dict[str, Any]:
        """Return the engine's arguments for a request, as plain data."""

    @abstractmethod
    def completion(self, running: RunningRequest, output: Output) -> Completion:
        """Return what an engine generated as a completion.

        Raises:
            RunError: It ended in a way that training has no use for.
        """

    def start(self, requests: Sequence[RunningRequest]) -> None:
        self._loop.spawn(self._run_all(requests))

    async def _run_all(self, requests: Sequence[RunningRequest]) -> None:
        await asyncio.gather(*map(self._run, requests))

    async def _run(self, running: RunningRequest) -> None:
        try:
            prompt_ids, arguments = running.request.prompt_ids, self.arguments(running)
            answer = await self._engine_of(running).generate(running.name, prompt_ids, arguments)
        except Exception as problem:  # noqa: BLE001 - it is raised where completions are taken
            answer = problem
        self._arrived.put((running.name, answer))

    def _engine_of(self, running: RunningRequest) -> LoopEngine:
        return self._engines[running.number % len(self._engines)]

    def stop(self, requests: Sequence[RunningRequest]) -> None:
        for engine in self._engines:
            if names := [running.name for running in requests if self._engine_of(running) is engine]:
                self._loop.spawn(_abort(engine, names))

    def poll(self, timeout_s: float) -> list[tuple[str, Output | Exception]]:
        return list(arrivals(self._arrived, timeout_s))

    def read(self, running: RunningRequest, answer: Output | Exception) -> Completion:
        if isinstance(answer, RunError) and not isinstance(answer, EngineFault):  # it would come again
            raise answer
        if isinstance(answer, Exception):
            raise EngineFault(f"request {running.request.request_id}: {type(answer).__name__}: {answer}") from answer
        return self.completion(running, answer)

    def wait_until_idle(self) -> None:
        """Wait until no request runs; completions that come meanwhile are kept.

        Raises:
            EngineFault: Some still run after a minute.
        """
        deadline = time.perf_counter() + IDLE_S
        while self.num_running:
            if time.perf_counter() > deadline:
                raise EngineFault(
                    f"{self.num_running} requests still run, and new weights must wait until they are collected or "
                    "aborted."
                )
            self.take(WAIT_S)


async def _abort(engine: LoopEngine, names: Sequence[str]) -> None:
    await engine.abort(names)
