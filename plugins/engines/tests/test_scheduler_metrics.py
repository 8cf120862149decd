"""Counters of servers' schedulers."""

from __future__ import annotations

import asyncio

import pytest
from rlplug_engines.colocated import EngineStats
from rlplug_engines.servers import SchedulerState
from rlplug_engines.servers.scheduler_metrics import SchedulerMetrics


class Backend:
    metrics_route = "metrics"

    def metrics(self, answer):
        return SchedulerState(0, 0, 0.0, **answer)


class Server:
    url = "http://n1:8000"

    async def get(self, route):
        return self.answer


def test_a_server_that_started_again_counts_from_zero():
    """A launcher starts it again at its URL: its counters are below those of its former start."""
    server, stats = Server(), EngineStats(max_num_seqs=8, kv_cache_tokens=1000)
    metrics = SchedulerMetrics(Backend(), [server], stats, lambda: True)
    for preemptions, tokens, cached in ((40, 1000, 700), (42, 1100, 720), (1, 100, 50)):
        server.answer = {"preemptions": preemptions, "prompt_tokens": tokens, "cached_prompt_tokens": cached}
        asyncio.run(metrics.sample())
    found = stats.drain()
    assert (found["preemptions"], found["prefix_cache_hits"]) == (3, 70 / 200)


def test_tokens_that_a_server_generated_and_did_not_send_are_counted():
    """Alone catches tokens of broken-off requests that are thrown away uncounted, or that are counted twice."""
    server, stats = Server(), EngineStats(max_num_seqs=8, kv_cache_tokens=1000)
    metrics = SchedulerMetrics(Backend(), [server], stats, lambda: True)
    found = []
    # 8 of 100 are lost; then 16 are on their way to a request that still runs, and come in the next count
    for generated, received in ((1000, 0), (1100, 92), (1200, 84), (1250, 63), (1280, 0)):
        server.answer = {"generated_tokens": generated}
        asyncio.run(metrics.sample())
        stats.received_tokens += received
        found.append(stats.drain().get("lost_tokens"))
    assert found == [None, 8, 16, 0, 17]
    assert sum(found[1:]) == 280 - (92 + 84 + 63)


def test_a_look_that_fails_is_not_the_last(monkeypatch):
    """Alone catches metrics that stop for the rest of a run after one answer that no client reads."""
    monkeypatch.setattr("rlplug_engines.servers.scheduler_metrics.SAMPLE_S", 0.01)

    class FailsOnce:
        url = "http://n1:8000"
        num_asked = 0

        async def get(self, route):
            self.num_asked += 1
            if self.num_asked == 2:
                raise UnicodeDecodeError("utf-8", b"", 0, 1, "a torn answer")
            return {"prompt_tokens": 100 * self.num_asked}

    async def look() -> None:
        task = asyncio.create_task(metrics.run())
        while not task.done() and server.num_asked < 4:
            await asyncio.sleep(0.01)
        task.cancel()

    server, stats = FailsOnce(), EngineStats(max_num_seqs=8, kv_cache_tokens=1000)
    metrics = SchedulerMetrics(Backend(), [server], stats, lambda: True)
    with pytest.warns(UserWarning, match="a torn answer"):
        asyncio.run(look())
    assert stats.prompt_tokens >= 200


def test_looks_that_overlap_count_nothing_twice():
    """Alone catches a late answer that is taken for a new start: 2,000,800 tokens were counted for 400."""

    class SlowFirst:
        url = "http://n1:8000"
        tokens = 1_000_000
        num_asked = 0

        async def get(self, route):
            self.num_asked += 1
            self.tokens += 200
            answer = {"prompt_tokens": self.tokens}
            await asyncio.sleep(0.1 if self.num_asked == 2 else 0)
            return answer

    async def look() -> None:
        await metrics.sample()
        await asyncio.gather(metrics.sample(), metrics.sample())

    stats = EngineStats(max_num_seqs=8, kv_cache_tokens=1000)
    metrics = SchedulerMetrics(Backend(), [SlowFirst()], stats, lambda: True)
    asyncio.run(look())
    assert stats.prompt_tokens == 400
