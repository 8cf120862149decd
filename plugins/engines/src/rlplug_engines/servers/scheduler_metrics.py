"""Polls the servers' schedulers while requests run, for the engine's stats."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Sequence
from typing import Final

from rlplug.errors import RunError, describe
from rlplug.interfaces import EngineFault
from rlplug_engines.colocated.stats import EngineStats
from rlplug_engines.servers.backend import SchedulerState, ServerBackend
from rlplug_engines.servers.http_client import Server
from rlplug_engines.servers.server_checks import reading

SAMPLE_S: Final = 0.5

COUNTERS: Final = ("preemptions", "prompt_tokens", "cached_prompt_tokens", "generated_tokens")


class SchedulerMetrics:
    """Asks all servers for their schedulers' state while requests run; in the client's loop."""

    def __init__(
        self, backend: ServerBackend, servers: Sequence[Server], stats: EngineStats, is_busy: Callable[[], bool]
    ) -> None:
        self._backend = backend
        self._servers = servers
        self._stats = stats
        self._is_busy = is_busy
        self._before: dict[str, SchedulerState] = {}
        self._looks = asyncio.Lock()

    def use(self, servers: Sequence[Server]) -> None:
        """Ask these servers from now on."""
        self._servers = servers

    async def run(self) -> None:
        """Sample until it is cancelled, and once at first: counters are of the time since then."""
        await self.sample()
        while True:
            await asyncio.sleep(SAMPLE_S)
            if self._is_busy():
                try:
                    await self.sample()
                except Exception as problem:  # noqa: BLE001 - tokens come all the same, and the next look may succeed
                    warnings.warn(f"The servers' metrics cannot be read: {describe(problem)}", stacklevel=2)

    async def sample(self) -> None:
        """Note the state of all servers; one that does not answer is left to the requests, which fail.

        One look waits for another's end: an answer that is older than the last one looks like a server's new start.
        """
        async with self._looks:
            await self._sample()

    async def _sample(self) -> None:
        servers = self._servers
        calls = (server.get(self._backend.metrics_route) for server in servers)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        now: dict[str, SchedulerState] = {}
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, RunError):
                    raise answer
                continue
            try:
                with reading(server.url):
                    now[server.url] = self._backend.metrics(answer)
            except EngineFault as problem:  # tokens may come all the same
                warnings.warn(f"The metrics of a server cannot be read. {problem}", stacklevel=2)
        if now:
            self._stats.observe(
                sum(state.running for state in now.values()),
                sum(state.waiting for state in now.values()),
                max(state.kv_cache_use for state in now.values()),
            )
        for url, state in now.items():
            before = self._before.get(url, state)
            for name in COUNTERS:
                now_is, was = getattr(state, name), getattr(before, name)
                change = now_is - was if now_is >= was else now_is  # a server that started again counts from 0
                setattr(self._stats, name, getattr(self._stats, name) + change)
        self._before |= now
