"""Requests in one engine or in several, and their completions until they are asked for."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from lightning.pytorch.utilities import rank_zero_info

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.rollout.engines import EngineStats, max_completion_tokens
from rlplug.types import NO_VERSION, Completion, Request, SamplingParams
from rlplug_rollout_trtllm.engine_loop import EngineLoop
from rlplug_rollout_trtllm.sampling import Output, sampling_arguments, to_completion

PROGRESS_S: Final = 30.0
WAIT_S: Final = 1.0
"""How often a wait looks at its deadline."""
IDLE_S: Final = 60.0
"""How long requests that were aborted may take to be gone."""


class Engine(Protocol):
    """What completes requests: a host of this process, or one elsewhere."""

    def generate(self, name: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> Awaitable[Output]:
        """Return what is generated for one request."""

    def abort(self, names: Sequence[str]) -> Awaitable[None]:
        """Stop requests."""


@dataclass(frozen=True)
class Asked:
    """A request that runs."""

    request: Request
    engine: Engine
    is_submitted: bool
    since: float


Work: TypeAlias = tuple[str, Engine, Sequence[int], Mapping[str, Any]]
"""A request's name, its engine, its prompt, and its sampling arguments."""


class EngineRequests:
    """Hands requests to engines in turn, and sorts what comes back.

    Requests of ``generate`` and those that were submitted run side by side. Those that were submitted may come from any
    thread.

    Args:
        loop: In which the engines are called.
        engines: Those that take requests, the first of which gets the first.
        context: Of the engines: prompt and completion together, in tokens.
        deadline_s: How long a request may take; a longer one counts as a fault.
    """

    def __init__(
        self,
        loop: EngineLoop,
        engines: Sequence[Engine],
        policy: PolicySpec,
        context: int,
        stats: EngineStats,
        deadline_s: float,
    ) -> None:
        self._loop = loop
        self._engines = itertools.cycle(engines)
        self._policy = policy
        self._context = context
        self._stats = stats
        self.deadline_s = deadline_s
        self.version = NO_VERSION
        """Of the policy that the engines have."""
        self._numbers = itertools.count()
        self._running: dict[str, Asked] = {}
        """By name, oldest first: the trainer's own names may come twice."""
        self._lock = threading.Lock()
        self._arrived: queue.SimpleQueue[tuple[str, Output | Exception]] = queue.SimpleQueue()
        self._ready: list[Completion] = []
        self._busy_since = 0.0

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Return the completions of ``requests``, in their order.

        Raises:
            RunError: A prompt leaves no room.
            EngineFault: An engine failed, or took too long; it has what was finished.
        """
        names = self._hand_in(requests, sampling, is_submitted=False)
        finished: dict[str, Completion] = {}
        began, next_line_s = time.perf_counter(), PROGRESS_S
        try:
            while len(finished) < len(names):
                finished |= self._take(WAIT_S)
                self._check_deadline()
                seconds = time.perf_counter() - began
                if seconds > next_line_s:
                    next_line_s += PROGRESS_S
                    rank_zero_info(f"rollout: {len(finished)} of {len(requests)} completions after {seconds:.0f} s")
        except EngineFault as fault:
            done = [*finished.values(), *fault.completions]
            message = f"TensorRT-LLM has {len(done)} of {len(requests)} completions and failed: {fault}"
            raise EngineFault(message, done) from fault
        return [finished[name] for name in names]

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Hand requests in, from any thread; they run whatever the trainer does."""
        self._hand_in(requests, sampling, is_submitted=True)

    def collect(self, timeout_s: float) -> list[Completion]:
        """Return what is ready of the submitted requests, waiting at most ``timeout_s`` for the first.

        Raises:
            EngineFault: An engine failed, or took too long; it has what was finished.
        """
        deadline = time.perf_counter() + timeout_s
        try:
            while True:
                left = deadline - time.perf_counter()
                others = self._take(0.0 if self._ready else max(0.0, min(left, WAIT_S)))
                assert not others, "what was not submitted is done when its call of generate returns"
                self._check_deadline()
                if self._ready or left <= 0:
                    return self._take_ready()
        except EngineFault as fault:
            raise EngineFault(str(fault), [*self._take_ready(), *fault.completions]) from fault

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop submitted requests, from any thread; what they have is collected. What is done is left alone."""
        unwanted = set(request_ids)
        with self._lock:
            running = [
                (name, asked.engine)
                for name, asked in self._running.items()
                if asked.is_submitted and asked.request.request_id in unwanted
            ]
        for engine in {id(engine): engine for _, engine in running}.values():
            self._loop.spawn(_abort(engine, [name for name, other in running if other is engine]))

    def wait_until_idle(self, deadline_s: float = IDLE_S) -> None:
        """Wait until no request runs; completions that come meanwhile are kept.

        Raises:
            EngineFault: Some still run after ``deadline_s``.
        """
        deadline = time.perf_counter() + deadline_s
        while self._running:
            if time.perf_counter() > deadline:
                raise EngineFault(
                    f"{len(self._running)} requests still run, and new weights must wait until they are collected or "
                    "aborted."
                )
            others = self._take(WAIT_S)
            assert not others, "what was not submitted is done when its call of generate returns"

    # ---- there and back -------------------------------------------------------------------------------------------

    def _hand_in(self, requests: Sequence[Request], sampling: SamplingParams, is_submitted: bool) -> list[str]:
        rooms = [max_completion_tokens(request, self._policy, self._context, "context_length") for request in requests]
        now, work = time.perf_counter(), list[Work]()
        with self._lock:
            if not self._running:
                self._busy_since = now
            for request, room in zip(requests, rooms, strict=True):
                name, engine = f"{next(self._numbers):x}", next(self._engines)
                self._running[name] = Asked(request, engine, is_submitted, now)
                work.append(
                    (name, engine, request.prompt_ids, sampling_arguments(request, sampling, self._policy, room))
                )
        self._loop.spawn(self._start(work))
        return [name for name, *_ in work]

    async def _start(self, work: Sequence[Work]) -> None:
        await asyncio.gather(*(self._run(*each) for each in work))

    async def _run(self, name: str, engine: Engine, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> None:
        try:
            self._arrived.put((name, await engine.generate(name, prompt_ids, sampling)))
        except Exception as problem:  # noqa: BLE001 - it is raised where completions are taken
            self._arrived.put((name, problem))

    def _take(self, timeout_s: float) -> dict[str, Completion]:
        """Take what came; return what finished of ``generate``, by name, and keep what was submitted."""
        others: dict[str, Completion] = {}
        for name, answer in self._arrivals(timeout_s):
            with self._lock:
                asked = self._running.pop(name)
            if isinstance(answer, RunError) and not isinstance(answer, EngineFault):  # it would come again
                raise answer
            if isinstance(answer, Exception):
                raise EngineFault(
                    f"request {asked.request.request_id}: {type(answer).__name__}: {answer}", list(others.values())
                ) from answer
            completion = to_completion(asked.request, answer, self._policy.eos_token_ids, self.version)
            self._stats.num_tokens += len(completion.token_ids)
            if asked.is_submitted:
                self._ready.append(completion)
            else:
                others[name] = completion
        self._count_seconds()
        return others

    def _arrivals(self, timeout_s: float) -> list[tuple[str, Output | Exception]]:
        """Return what came, failures last, waiting for the first."""
        arrived: list[tuple[str, Output | Exception]] = []
        try:
            arrived.append(self._arrived.get(timeout=timeout_s) if timeout_s > 0 else self._arrived.get_nowait())
            while True:
                arrived.append(self._arrived.get_nowait())
        except queue.Empty:
            return sorted(arrived, key=lambda each: isinstance(each[1], Exception))

    def _take_ready(self) -> list[Completion]:
        ready, self._ready = self._ready, []
        return ready

    def _count_seconds(self) -> None:
        """Count how long requests ran."""
        now = time.perf_counter()
        with self._lock:
            if self._busy_since:
                self._stats.seconds += now - self._busy_since
                self._busy_since = now if self._running else 0.0

    def _check_deadline(self) -> None:
        with self._lock:
            oldest = next(iter(self._running.values()), None)
        if oldest is not None and time.perf_counter() - oldest.since > self.deadline_s:
            raise EngineFault(f"it took longer than rollout.generate_deadline_s {self.deadline_s:g}.")


async def _abort(engine: Engine, names: Sequence[str]) -> None:
    await engine.abort(names)
