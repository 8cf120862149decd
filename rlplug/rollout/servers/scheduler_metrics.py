"""What servers tell of their schedulers while requests run, in the words of an engine's stats."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlplug.errors import RunError
from rlplug.rollout.engines.stats import EngineStats
from rlplug.rollout.servers.http_client import HTTPClient

SAMPLE_S: Final = 0.5

COUNTERS: Final = ("preemptions", "prompt_tokens", "cached_prompt_tokens")


@dataclass(frozen=True)
class SchedulerState:
    """Of one server, over all copies of its model; counters are those since it started."""

    running: int
    waiting: int
    kv_cache_use: float
    """The largest of its copies, as a share."""
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0


class SchedulerMetrics(ABC):
    """Asks all servers while requests run; in the client's loop."""

    route: str
    """Where a server tells of its scheduler."""

    def __init__(
        self, client: HTTPClient, urls: Sequence[str], stats: EngineStats, is_busy: Callable[[], bool]
    ) -> None:
        self._client = client
        self._urls = urls
        self._stats = stats
        self._is_busy = is_busy
        self._before: dict[str, SchedulerState] = {}

    @abstractmethod
    def read(self, answer: Any) -> SchedulerState:
        """Return what a server's answer says."""

    async def run(self) -> None:
        """Sample until it is cancelled, and once at first: counters are of the time since then."""
        await self.sample()
        while True:
            await asyncio.sleep(SAMPLE_S)
            if self._is_busy():
                await self.sample()

    async def sample(self) -> None:
        """Note how all servers are now; one that does not answer is left to the requests, which fail."""
        questions = (self._client.ask("GET", f"{url}/{self.route}") for url in self._urls)
        answers = await asyncio.gather(*questions, return_exceptions=True)
        now: dict[str, SchedulerState] = {}
        for url, answer in zip(self._urls, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, RunError):
                    raise answer
                continue
            now[url] = self.read(answer)
        if now:
            self._stats.observe(
                sum(state.running for state in now.values()),
                sum(state.waiting for state in now.values()),
                max(state.kv_cache_use for state in now.values()),
            )
        for url, state in now.items():
            before = self._before.get(url, state)
            for name in COUNTERS:
                change = getattr(state, name) - getattr(before, name)
                setattr(self._stats, name, getattr(self._stats, name) + change)
        self._before |= now
