"""Requests in one engine or in several, each of which lives in an event loop."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.rollout.engines import EngineLoop, EngineRequests, EngineStats, RunningRequest
from rlplug.types import Completion
from rlplug_rollout_trtllm.engine_host import EngineHost
from rlplug_rollout_trtllm.options import TRTLLMOptions
from rlplug_rollout_trtllm.sampling import Output, sampling_arguments, to_completion

IDLE_S: Final = 60.0
"""How long requests that were aborted may take to be gone."""

WAIT_S: Final = 1.0
"""How often a wait looks at its deadline."""

Answer: TypeAlias = Output | Exception


def make_stats(options: TRTLLMOptions) -> EngineStats:
    """Return counters of tokens and time; what TensorRT-LLM's scheduler does is not looked at."""
    return EngineStats(
        max_num_seqs=options.max_batch_size or 0,
        kv_cache_tokens=0,  # it is not told
        max_num_seqs_key="rollout.max_batch_size",
        memory_key="rollout.free_gpu_memory_fraction",
        observes_scheduler=False,
    )


class TRTLLMRequests(EngineRequests[Answer]):
    """Hands requests to engines in turn.

    Args:
        loop: Engines are called in it.
        engines: Those that take requests, the first of which gets the first.
    """

    engine = "TensorRT-LLM"

    def __init__(
        self,
        loop: EngineLoop,
        engines: Sequence[EngineHost],
        policy: PolicySpec,
        options: TRTLLMOptions,
        stats: EngineStats,
        deadline_s: float,
    ) -> None:
        super().__init__(policy, options.longest(policy), stats, deadline_s)
        self._loop = loop
        self._engines = engines
        self._arrived: queue.SimpleQueue[tuple[str, Answer]] = queue.SimpleQueue()

    def start(self, requests: Sequence[RunningRequest]) -> None:
        self._loop.spawn(self._run_all(requests))

    async def _run_all(self, requests: Sequence[RunningRequest]) -> None:
        await asyncio.gather(*map(self._run, requests))

    async def _run(self, running: RunningRequest) -> None:
        prompt_ids, arguments = running.request.prompt_ids, sampling_arguments(running, self.policy)
        try:
            answer: Answer = await self._engine_of(running).generate(running.name, prompt_ids, arguments)
        except Exception as problem:  # noqa: BLE001 - it is raised where completions are taken
            answer = problem
        self._arrived.put((running.name, answer))

    def _engine_of(self, running: RunningRequest) -> EngineHost:
        return self._engines[running.number % len(self._engines)]

    def stop(self, requests: Sequence[RunningRequest]) -> None:
        for engine in self._engines:
            if names := [running.name for running in requests if self._engine_of(running) is engine]:
                self._loop.spawn(engine.abort(names))

    def poll(self, timeout_s: float) -> list[tuple[str, Answer]]:
        arrived: list[tuple[str, Answer]] = []
        try:
            arrived.append(self._arrived.get(timeout=timeout_s) if timeout_s > 0 else self._arrived.get_nowait())
            while True:
                arrived.append(self._arrived.get_nowait())
        except queue.Empty:
            return arrived

    def read(self, running: RunningRequest, answer: Answer) -> Completion:
        if isinstance(answer, RunError) and not isinstance(answer, EngineFault):  # it would come again
            raise answer
        if isinstance(answer, Exception):
            raise EngineFault(f"request {running.request.request_id}: {type(answer).__name__}: {answer}") from answer
        return to_completion(running.request, answer, self.policy.eos_token_ids, self.version)

    def wait_until_idle(self) -> None:
        """Wait until no request runs; completions that come meanwhile are kept.

        Raises:
            EngineFault: Some still run after ``IDLE_S``.
        """
        deadline = time.perf_counter() + IDLE_S
        while self.num_running:
            if time.perf_counter() > deadline:
                raise EngineFault(
                    f"{self.num_running} requests still run, and new weights must wait until they are collected or "
                    "aborted."
                )
            self.take(WAIT_S)
