"""Requests that run in an engine: their names, their deadline, and their completions until somebody takes them."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, TypeVar

from rlplug.errors import RLPlugError
from rlplug.interfaces.rollout import EngineFault, PolicySpec
from rlplug.observability.phase_progress import PHASE_PROGRESS
from rlplug.rollout.context_limit import max_completion_tokens
from rlplug.types import NO_VERSION, Completion, Request, SamplingParams
from rlplug_engines.colocated.stats import EngineStats

Answer = TypeVar("Answer")
Item = TypeVar("Item")

WAIT_S: Final = 1.0
"""How often a wait looks at its deadline."""


@dataclass(frozen=True)
class RunningRequest:
    """A request that an engine works on."""

    number: int
    """Requests are counted from 0."""
    request: Request
    sampling: SamplingParams
    max_tokens: int
    """How long the completion may become: what is asked for, or less where the context ends."""
    is_submitted: bool
    """Whether ``collect`` returns its completion; otherwise ``generate`` does."""
    since: float
    """Time of the tracker's clock."""

    @property
    def name(self) -> str:
        """The engine's name for it. The trainer's own may come twice; these differ, and are of equal length."""
        return f"{self.number:016x}"


class EngineRequests(ABC, Generic[Answer]):
    """Hands requests to an engine, sorts what comes back, and keeps deadlines.

    Requests of ``generate`` and those that were submitted run side by side. ``generate`` and ``collect`` are called in
    one thread; ``submit`` and ``abort`` in any. ``Answer`` is what the engine returns for a request.

    Args:
        policy: For the context, and for a subclass.
        context: Of the engine: prompt and completion together, in tokens.
        stats: Counts tokens, and for how long requests ran.
        deadline_s: How long a request may take; a longer one counts as a fault.
    """

    engine: ClassVar[str]
    """Name of the engine, for messages."""
    context_key: ClassVar[str] = "context_length"
    """The option that sets the context, for messages."""

    def __init__(self, policy: PolicySpec, context: int, stats: EngineStats, deadline_s: float) -> None:
        self.policy = policy
        self.stats = stats
        self.deadline_s = deadline_s
        self.version = NO_VERSION
        """Of the policy that the engine has."""
        self.is_stopping: Callable[[], bool] = lambda: False
        """Returns whether the run is told to stop; then ``generate`` has the engine end what is not complete."""
        self._context = context
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._running: dict[str, RunningRequest] = {}
        """By name, oldest first."""
        self._missing: set[str] = set()
        """Names of the requests of ``generate`` that have no completion yet."""
        self._finished: dict[str, Completion] = {}
        """Of ``generate``, by name."""
        self._num_finished_tokens = 0
        self._ready: list[Completion] = []
        """Of what was submitted."""
        self._busy_since: float | None = None

    # ---- the engine's own -----------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, requests: Sequence[RunningRequest]) -> None:
        """Give requests to the engine, from any thread."""

    @abstractmethod
    def stop(self, requests: Sequence[RunningRequest]) -> None:
        """Have the engine end requests early, from any thread. Each is still answered, with the tokens that it has."""

    @abstractmethod
    def poll(self, timeout_s: float) -> Iterable[tuple[str, Answer]]:
        """Return the names and answers that came, waiting at most ``timeout_s`` for the first.

        Raises:
            EngineFault: The engine failed.
        """

    @abstractmethod
    def read(self, running: RunningRequest, answer: Answer) -> Completion:
        """Return an answer as a completion.

        Raises:
            RunError: The request ended in a way that training has no use for.
            EngineFault: The engine failed at it.
        """

    def clock(self) -> float:
        """Return the time by which deadlines and ``tokens_per_s`` are measured, in seconds."""
        return time.perf_counter()

    def guard(self) -> AbstractContextManager[None]:
        """Surround a call of ``generate`` or ``collect``; what it raises counts as raised there."""
        return nullcontext()

    # ---- what the trainer calls -----------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """How many requests the engine has not answered."""
        return len(self._running)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Return the completions of ``requests``, in their order.

        Raises:
            RunError: A prompt leaves no room; then nothing was started.
            EngineFault: The engine failed, or took too long; it has what was finished.
        """
        self._finished, self._num_finished_tokens = {}, 0
        limits = self._limits(requests, sampling)
        with self._faults(self._take_finished, lambda: len(requests)):
            names = [running.name for running in self._start(requests, sampling, limits, is_submitted=False)]
            self._missing, is_stopped = set(names), False
            while self._missing:
                self.take(WAIT_S)
                PHASE_PROGRESS.in_call(len(self._finished), self._num_finished_tokens)
                if self._missing and not is_stopped and self.is_stopping():
                    is_stopped = True
                    self.stop([running for running in self._running.values() if running.name in self._missing])
                self._check_deadline()
            return [self._finished[name] for name in names]

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Hand requests in, from any thread.

        Raises:
            RunError: A prompt leaves no room; then nothing was started.
        """
        self._start(requests, sampling, self._limits(requests, sampling), is_submitted=True)

    def collect(self, timeout_s: float) -> list[Completion]:
        """Return what is ready of the submitted requests, waiting at most ``timeout_s`` for the first.

        Raises:
            EngineFault: The engine failed, or took too long; it has what was ready.
        """
        deadline = time.perf_counter() + timeout_s
        with self._faults(self._take_ready, lambda: len(self._ready) + self.num_running):
            while True:
                left = deadline - time.perf_counter()
                self.take(0.0 if self._ready else max(0.0, min(left, WAIT_S)))
                self._check_deadline()
                if self._ready or left <= 0:
                    return self._take_ready()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop submitted requests, from any thread; what they have is collected. What is done is left alone."""
        unwanted = set(request_ids)
        with self._lock:
            running = [r for r in self._running.values() if r.is_submitted and r.request.request_id in unwanted]
        self.stop(running)

    def take(self, timeout_s: float) -> None:
        """Sort what came, waiting at most ``timeout_s`` for the first; ``generate`` and ``collect`` return it.

        Raises:
            RunError: The first problem among the answers, when all others are sorted.
            EngineFault: The same, or the engine failed.
        """
        problem: RLPlugError | None = None
        for name, answer in self.poll(timeout_s):
            with self._lock:
                running = self._running.pop(name)
            try:
                completion = self.read(running, answer)
            except RLPlugError as error:
                problem = problem or error
                continue
            self.stats.num_tokens += len(completion.token_ids)
            self.stats.aborted += completion.finish_reason == "abort"
            if running.is_submitted:
                self._ready.append(completion)
            else:
                self._finished[name] = completion
                self._num_finished_tokens += len(completion.token_ids)
                self._missing.discard(name)
        self._count_seconds()
        if problem is not None:
            raise problem

    # ---- bookkeeping ----------------------------------------------------------------------------------------------

    def _limits(self, requests: Sequence[Request], sampling: SamplingParams) -> list[int]:
        return [
            min(request.limit(sampling), max_completion_tokens(request, self.policy, self._context, self.context_key))
            for request in requests
        ]

    def _start(
        self, requests: Sequence[Request], sampling: SamplingParams, limits: Sequence[int], is_submitted: bool
    ) -> list[RunningRequest]:
        now = self.clock()
        started = [
            RunningRequest(next(self._numbers), request, sampling, limit, is_submitted, now)
            for request, limit in zip(requests, limits, strict=True)
        ]
        with self._lock:
            if not self._running:
                self._busy_since = now
            self._running |= {running.name: running for running in started}
            self.stats.handed_over = max(self.stats.handed_over, len(self._running))
        self.start(started)
        return started

    def _count_seconds(self) -> None:
        """Count how long requests ran."""
        now = self.clock()
        with self._lock:
            if self._busy_since is not None:
                self.stats.seconds += now - self._busy_since
                self._busy_since = now if self._running else None

    def _check_deadline(self) -> None:
        with self._lock:
            oldest = next(iter(self._running.values()), None)
        if oldest is not None and self.clock() - oldest.since > self.deadline_s:
            raise EngineFault(f"it took longer than rollout.generate_deadline_s {self.deadline_s:g}.")

    def _take_ready(self) -> list[Completion]:
        ready, self._ready = self._ready, []
        return ready

    def _take_finished(self) -> list[Completion]:
        finished, self._finished = self._finished, {}
        return list(finished.values())

    @contextmanager
    def _faults(self, done: Callable[[], list[Completion]], total: Callable[[], int]) -> Iterator[None]:
        """Add to a fault what is done."""
        try:
            with self.guard():
                yield
        except EngineFault as fault:
            num_all, completions = total(), done()
            message = f"{self.engine} has {len(completions)} of {num_all} completions and failed: {fault}"
            raise EngineFault(message, completions) from fault


def arrivals(items: queue.SimpleQueue[Item], timeout_s: float) -> Iterator[Item]:
    """Yield what is in a queue, waiting at most ``timeout_s`` for the first."""
    try:
        yield items.get(timeout=timeout_s) if timeout_s > 0 else items.get_nowait()
        while True:
            yield items.get_nowait()
    except queue.Empty:
        return
