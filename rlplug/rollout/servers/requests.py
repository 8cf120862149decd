"""Requests that servers work on: sent, collected, aborted."""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault
from rlplug.rollout.engines.stats import EngineStats
from rlplug.rollout.servers.http_client import HTTPClient
from rlplug.types import Completion, Request, SamplingParams


@dataclass(eq=False)
class Job:
    """One request on its way.

    Its tokens come all at once, or, for one that may be aborted, as they are generated: then an abort needs no answer
    from a server, which is late when its steps are short.
    """

    request: Request
    sampling: SamplingParams
    arguments: dict[str, Any]
    """The same for this request, in the engine's own words."""
    version: int
    is_streamed: bool
    url: str = ""
    task: asyncio.Task[Any] | None = None
    is_aborted: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """For servers that ask for one; no two jobs have the same, also of one request."""
    weight_version: str | None = None
    """Of what generated it, where the server says it with each answer."""
    cached_prompt_tokens: int | None = None
    """Tokens of the prompt that were not computed again, where the server says it with each answer."""
    preemptions: int = 0
    """How often it lost its cache, where the server says it with each answer."""


class RequestAdapter(ABC):
    """How one engine's servers are asked for completions, and how they answer."""

    engine: ClassVar[str]
    """For messages."""
    route: ClassVar[str]
    """Takes requests, and answers with JSON, or with server-sent events."""

    @abstractmethod
    def question(self, job: Job) -> dict[str, Any]:
        """Return what to post."""

    @abstractmethod
    def receive(self, job: Job, answer: dict[str, Any]) -> None:
        """Add the tokens of an answer, or of an event of a stream, to the job.

        Raises:
            RunError: It is not what was asked for.
        """

    @abstractmethod
    def completion(self, job: Job) -> Completion:
        """Return what came.

        Raises:
            RunError: It ended in a way that training has no use for.
        """

    def abort(self, job: Job) -> tuple[str, dict[str, Any]] | None:
        """Return the route, and what to post there, that stops a job; ``None`` when closing its connection does."""
        return None


class ServerRequests:
    """Sends each request to the next server, and keeps what comes back until it is collected.

    Only the client's loop touches what is counted here, so that any thread may call.

    Args:
        first: The server that gets the first request; trainer ranks begin with different ones.
        deadline_s: For one completion, its waiting included.
        stats: Counts tokens, and the seconds in which any request runs.
        dialect: The servers' own.
    """

    def __init__(
        self,
        client: HTTPClient,
        urls: Sequence[str],
        first: int,
        deadline_s: float,
        stats: EngineStats,
        dialect: RequestAdapter,
    ) -> None:
        self._client = client
        self._dialect = dialect
        self._urls = itertools.cycle([*urls[first % len(urls) :], *urls[: first % len(urls)]])
        self._deadline_s = deadline_s
        self._stats = stats
        self._running: dict[str, Job] = {}
        self._busy_since = 0.0
        self._done: queue.SimpleQueue[Completion | RunError] = queue.SimpleQueue()

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def generate(self, jobs: Sequence[Job]) -> list[Completion]:
        """Return the completions of ``jobs``, in their order.

        Raises:
            EngineFault: One could not be had; it holds those that were complete.
        """
        futures = [self._client.spawn(self._run(job)) for job in jobs]
        wait(futures, return_when=FIRST_EXCEPTION)
        problems = [problem for future in futures if future.done() and (problem := future.exception())]
        if not problems:
            return [future.result() for future in futures]
        done = [future.result() for future in futures if future.done() and not future.exception()]
        for future in futures:
            future.cancel()
        raise self._worst(problems, done)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Send requests, and do not wait for them."""
        for job in jobs:
            self._client.spawn(self._run(job)).add_done_callback(self._keep)

    def _keep(self, future: Future[Completion]) -> None:
        if not future.cancelled():
            problem = future.exception()
            assert problem is None or isinstance(problem, RunError), problem
            self._done.put(problem or future.result())

    def collect(self, timeout_s: float) -> list[Completion]:
        """Return what is complete, waiting for the first.

        Raises:
            EngineFault: A request could not be completed; it holds those that were.
        """
        results: list[Completion | RunError] = []
        try:
            results.append(self._done.get(timeout=max(timeout_s, 0.0)))
            while True:
                results.append(self._done.get_nowait())
        except queue.Empty:
            pass
        done = [result for result in results if isinstance(result, Completion)]
        if problems := [result for result in results if isinstance(result, RunError)]:
            raise self._worst(problems, done)
        return done

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; each comes back with what it has."""
        for request_id in request_ids:
            self._client.spawn(self._abort(request_id))

    # ---- in the client's loop -------------------------------------------------------------------------------------

    async def _run(self, job: Job) -> Completion:
        self._begin(job)
        try:
            if job.is_streamed:
                async for event in self._client.ask_for_stream(*self._question(job)):
                    self._dialect.receive(job, event)
            else:
                self._dialect.receive(job, await self._client.ask("POST", *self._question(job)))
        except asyncio.CancelledError:
            if not job.is_aborted:
                raise
            job.finish_reason = (
                job.finish_reason or "abort"
            )  # its connection is closed now, on which the server stops it
        finally:
            self._end(job)
        if job.finish_reason is None:
            raise EngineFault(f"{job.url} broke off a completion after {len(job.token_ids)} tokens.")
        self._count(job)
        return self._dialect.completion(job)

    def _question(self, job: Job) -> tuple[str, dict[str, Any], float, str]:
        url = f"{job.url}/{self._dialect.route}"
        return url, self._dialect.question(job), self._deadline_s, "request_deadline_s"

    def _count(self, job: Job) -> None:
        self._stats.num_tokens += len(job.token_ids)
        self._stats.preemptions += job.preemptions
        if job.cached_prompt_tokens is not None:
            self._stats.prompt_tokens += len(job.request.prompt_ids)
            self._stats.cached_prompt_tokens += job.cached_prompt_tokens

    def _begin(self, job: Job) -> None:
        if not self._running:
            self._busy_since = time.perf_counter()
        job.task = asyncio.current_task()
        job.url = next(self._urls)
        self._running[job.request.request_id] = job

    def _end(self, job: Job) -> None:
        self.count_seconds()
        if self._running.get(job.request.request_id) is job:
            del self._running[job.request.request_id]

    def count_seconds(self) -> None:
        """Add the time since the last call to the stats, if anything runs."""
        if self._running:
            now = time.perf_counter()
            self._stats.seconds += now - self._busy_since
            self._busy_since = now

    async def _abort(self, request_id: str) -> None:
        job = self._running.get(request_id)
        if job is not None and job.task is not None:
            job.is_aborted = True
            job.task.cancel()
            if question := self._dialect.abort(job):
                route, payload = question
                try:
                    await self._client.ask("POST", f"{job.url}/{route}", payload)
                except RunError as problem:
                    self._done.put(problem)

    def _worst(self, problems: Sequence[BaseException], done: Sequence[Completion]) -> BaseException:
        """Return what to raise: a refusal as it is, since it would come again, and a fault with what is complete."""
        problem = next((p for p in problems if not isinstance(p, EngineFault)), problems[0])
        if not isinstance(problem, EngineFault):
            return problem
        return EngineFault(f"{self._dialect.engine} has {len(done)} completions and failed: {problem}", done)
