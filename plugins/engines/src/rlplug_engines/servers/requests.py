"""Requests to servers: sent, collected, aborted."""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Final

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault
from rlplug.types import Completion
from rlplug_engines.colocated.stats import EngineStats
from rlplug_engines.servers.backend import PendingRequest, ServerBackend
from rlplug_engines.servers.http_client import HTTPClient, Server
from rlplug_engines.servers.server_checks import reading

WAIT_S: Final = 1.0
"""How often a wait looks whether the run is told to stop."""


class ServerRequests:
    """Sends each request to the next server, and keeps what comes back until it is collected.

    Only the client's loop touches what is counted here, so that any thread may call.

    Args:
        backend: Makes payloads, and reads answers.
        client: Calls the servers.
        urls: The servers'.
        first: Index of the server that gets the first request; trainer ranks begin with different ones.
        deadline_s: Longest time in which a server answers none of its requests; those that wait for others may take
            longer.
        stats: Counts tokens, and the seconds in which any request runs.
    """

    def __init__(
        self,
        backend: ServerBackend,
        client: HTTPClient,
        urls: Sequence[str],
        first: int,
        deadline_s: float,
        stats: EngineStats,
    ) -> None:
        self._backend = backend
        self._client = client
        self._first = first
        self.use(urls)
        self._deadline_s = deadline_s
        self._stats = stats
        self.is_stopping: Callable[[], bool] = lambda: False
        """Returns whether the run is told to stop; then ``generate`` aborts what is not complete."""
        self._running: dict[str, PendingRequest] = {}
        self._answered_at: dict[str, float] = {}  # by the server's address, in the loop's time
        self._busy_since = 0.0
        self._done: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()

    def use(self, urls: Sequence[str]) -> None:
        """Send later requests to these servers; those that run stay where they are."""
        start = self._first % len(urls)
        self._servers = itertools.cycle([Server(self._client, url) for url in [*urls[start:], *urls[:start]]])

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def generate(self, requests: Sequence[PendingRequest]) -> list[Completion]:
        """Return the completions of requests, in their order.

        Raises:
            EngineFault: One could not be had; it holds those that were complete.
        """
        futures = [self._client.spawn(self._run(pending)) for pending in requests]
        is_stopped = False
        while wait(futures, WAIT_S, FIRST_EXCEPTION).not_done and not _failures(futures):
            if not is_stopped and self.is_stopping():
                is_stopped = True
                self.abort([pending.request.request_id for pending in requests])
        problems = _failures(futures)
        if not problems:
            return [future.result() for future in futures]
        done = [future.result() for future in futures if future.done() and not future.exception()]
        for future in futures:
            future.cancel()
        raise self._worst(problems, done)

    def submit(self, requests: Sequence[PendingRequest]) -> None:
        """Send requests, and do not wait for them."""
        for pending in requests:
            self._client.spawn(self._run(pending)).add_done_callback(self._keep)

    def _keep(self, future: Future[Completion]) -> None:
        if not future.cancelled():
            self._done.put(future.exception() or future.result())

    def collect(self, timeout_s: float) -> list[Completion]:
        """Return what is complete, waiting for the first.

        Raises:
            EngineFault: A request could not be completed; it holds those that were.
        """
        results: list[Completion | BaseException] = []
        try:
            results.append(self._done.get(timeout=max(timeout_s, 0.0)))
            while True:
                results.append(self._done.get_nowait())
        except queue.Empty:
            pass
        done = [result for result in results if isinstance(result, Completion)]
        if problems := [result for result in results if not isinstance(result, Completion)]:
            raise self._worst(problems, done)
        return done

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; each comes back with what it has."""
        for request_id in request_ids:
            self._client.spawn(self._abort(request_id))

    # ---- in the client's loop -------------------------------------------------------------------------------------

    async def _run(self, pending: PendingRequest) -> Completion:
        server = self._begin(pending)
        try:
            async with asyncio.timeout(self._deadline_s) as pending.limit:
                await self._receive(server, pending)
        except TimeoutError:
            limit = f"rollout.request_deadline_s {self._deadline_s:g} s"
            raise EngineFault(f"{server.url} did not answer within {limit}, nor another request.") from None
        except asyncio.CancelledError:
            if not pending.is_aborted:
                raise
            # its connection is closed now, on which the server stops it
            pending.finish_reason = pending.finish_reason or "abort"
        finally:
            self._end(pending)
        if pending.finish_reason is None:
            raise EngineFault(f"{server.url} broke off a completion after {len(pending.token_ids)} tokens.")
        pending.check()
        self._count(pending)
        with reading(server.url):
            return self._backend.completion(pending)

    async def _receive(self, server: Server, pending: PendingRequest) -> None:
        url, payload = f"{server.url}/{self._backend.generate_route}", self._backend.payload(pending)
        if pending.is_streamed:
            async for event in self._client.stream(url, payload):
                self._read(server, pending, event)
        else:
            answer = await self._client.call("POST", url, payload, None)
            self._read(server, pending, answer)

    def _read(self, server: Server, pending: PendingRequest, answer: Any) -> None:
        num_before = len(pending.token_ids)
        with reading(server.url):
            self._backend.receive(pending, answer)
        self._stats.received_tokens += len(pending.token_ids) - num_before
        self._note_answer(server)

    def _note_answer(self, server: Server) -> None:
        """Begin the deadlines of the server's requests anew: it works, and some may wait for others in it."""
        now = asyncio.get_running_loop().time()
        if now - self._answered_at.get(server.url, 0.0) < min(WAIT_S, self._deadline_s / 10):
            return
        self._answered_at[server.url] = now
        for pending in self._running.values():
            if pending.limit is not None and pending.url == server.url and not pending.limit.expired():
                pending.limit.reschedule(now + self._deadline_s)

    def _count(self, pending: PendingRequest) -> None:
        self._stats.num_tokens += len(pending.token_ids)
        self._stats.aborted += pending.finish_reason == "abort"
        self._stats.preemptions += pending.preemptions
        if pending.cached_prompt_tokens is not None:
            self._stats.prompt_tokens += len(pending.request.prompt_ids)
            self._stats.cached_prompt_tokens += pending.cached_prompt_tokens

    def _begin(self, pending: PendingRequest) -> Server:
        if not self._running:
            self._busy_since = time.perf_counter()
        pending.task = asyncio.current_task()
        pending.server = next(self._servers)
        self._running[pending.request.request_id] = pending
        return pending.server

    def _end(self, pending: PendingRequest) -> None:
        self.count_seconds()
        if self._running.get(pending.request.request_id) is pending:
            del self._running[pending.request.request_id]

    def count_seconds(self) -> None:
        """Add the time since the last call to the stats, if anything runs."""
        if self._running:
            now = time.perf_counter()
            self._stats.seconds += now - self._busy_since
            self._busy_since = now

    async def _abort(self, request_id: str) -> None:
        pending = self._running.get(request_id)
        if pending is not None and pending.task is not None and pending.server is not None:
            pending.is_aborted = True
            pending.task.cancel()
            try:
                await self._backend.abort(pending.server, pending)
            except RunError as problem:
                self._done.put(problem)

    def _worst(self, problems: Sequence[BaseException], done: Sequence[Completion]) -> BaseException:
        """Return what to raise: a refusal as it is, since it would come again, and a fault with what is complete."""
        problem = next((p for p in problems if not isinstance(p, EngineFault)), problems[0])
        if not isinstance(problem, EngineFault):
            return problem
        return EngineFault(f"{self._backend.labels.engine} has {len(done)} completions and failed: {problem}", done)


def _failures(futures: Sequence[Future[Any]]) -> list[BaseException]:
    """Return the exceptions of those that are done."""
    return [problem for future in futures if future.done() and (problem := future.exception())]
