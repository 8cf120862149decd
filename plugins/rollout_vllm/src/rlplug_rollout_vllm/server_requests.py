"""Requests that servers work on: sent, collected, aborted."""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, Final

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault
from rlplug.types import Completion, Request
from rlplug_rollout_vllm.http_client import HTTPClient
from rlplug_rollout_vllm.sampling import to_completion
from rlplug_rollout_vllm.stats import EngineStats

FINAL_ONLY: Final = 2
"""vLLM's ``RequestOutputKind``: without it, 0.26 puts the whole completion together anew for every token. Requests
whose tokens are streamed get others."""


@dataclass(eq=False)
class Job:
    """One request on its way.

    Its tokens come all at once, or, for one that may be aborted, as they are generated: then an abort needs no answer
    from a server, which is late when its steps are short.
    """

    request: Request
    sampling: dict[str, Any]
    """Arguments of vLLM's ``SamplingParams``."""
    version: int
    is_streamed: bool
    url: str = ""
    task: asyncio.Task[Any] | None = None
    is_aborted: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def receive(self, answer: dict[str, Any]) -> None:
        """Take tokens from an answer of ``/inference/v1/generate``, or an event of its stream."""
        for choice in answer["choices"]:
            token_ids = choice["token_ids"] or []
            content = (choice["logprobs"] or {}).get("content") or []
            if len(content) != len(token_ids):
                raise EngineFault(f"{self.url} gave {len(content)} logprobs for {len(token_ids)} tokens.")
            self.token_ids += token_ids
            self.logprobs += [float(entry["logprob"]) for entry in content]
            self.finish_reason = choice["finish_reason"]


class ServerRequests:
    """Sends each request to the next server, and keeps what comes back until it is collected.

    Only the client's loop touches what is counted here, so that any thread may call.

    Args:
        first: The server that gets the first request; trainer ranks begin with different ones.
        deadline_s: For one completion, its waiting included.
        stats: Counts tokens, and the seconds in which any request runs.
    """

    def __init__(
        self, client: HTTPClient, urls: Sequence[str], first: int, deadline_s: float, stats: EngineStats
    ) -> None:
        self._client = client
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
        raise _worst(problems, done)

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
            raise _worst(problems, done)
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
                    job.receive(event)
            else:
                job.receive(await self._client.ask("POST", *self._question(job)))
        except asyncio.CancelledError:
            if not job.is_aborted:
                raise
            job.finish_reason = "abort"  # its connection is closed now, on which the server stops it
        finally:
            self._end(job)
        if job.finish_reason is None:
            raise EngineFault(f"{job.url} broke off a completion after {len(job.token_ids)} tokens.")
        self._stats.num_tokens += len(job.token_ids)
        return to_completion(job.request.request_id, job.token_ids, job.logprobs, job.finish_reason, job.version)

    def _question(self, job: Job) -> tuple[str, dict[str, Any], float, str]:
        payload = {
            "token_ids": job.request.prompt_ids,
            "sampling_params": {**job.sampling, "output_kind": FINAL_ONLY},
            "stream": job.is_streamed,
        }
        return f"{job.url}/inference/v1/generate", payload, self._deadline_s, "request_deadline_s"

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


def _worst(problems: Sequence[BaseException], done: Sequence[Completion]) -> BaseException:
    """Return what to raise: a refusal as it is, since it would come again, and a fault with what is complete."""
    problem = next((p for p in problems if not isinstance(p, EngineFault)), problems[0])
    if not isinstance(problem, EngineFault):
        return problem
    return EngineFault(f"vLLM has {len(done)} completions and failed: {problem}", done)
