"""What servers tell of themselves at ``/metrics``, in the words of an engine's stats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from rlplug.errors import RunError
from rlplug_rollout_vllm.http_client import HTTPClient
from rlplug_rollout_vllm.stats import EngineStats

SAMPLE_S: Final = 0.5

SUMMED: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "cached_prompt_tokens",
}
KV_CACHE_USE: Final = "vllm:kv_cache_usage_perc"
COUNTERS: Final = ("preemptions", "prompt_tokens", "cached_prompt_tokens")


def read_metrics(text: str) -> dict[str, float]:
    """Return the sums over a server's engines by the names of the stats; the KV cache's use is the largest."""
    from prometheus_client.parser import text_string_to_metric_families

    found = dict.fromkeys(SUMMED.values(), 0.0)
    kv_cache_use = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in SUMMED:
                found[SUMMED[sample.name]] += sample.value
            elif sample.name == KV_CACHE_USE:
                kv_cache_use = max(kv_cache_use, sample.value)
    return {**found, "kv_cache_use": kv_cache_use}


class MetricsSampler:
    """Reads all servers' metrics while requests run; in the client's loop."""

    def __init__(
        self, client: HTTPClient, urls: Sequence[str], stats: EngineStats, is_busy: Callable[[], bool]
    ) -> None:
        self._client = client
        self._urls = urls
        self._stats = stats
        self._is_busy = is_busy
        self._before: dict[str, dict[str, float]] = {}

    async def run(self) -> None:
        """Sample until it is cancelled, and once at first: counters are of the time since then."""
        await self.sample()
        while True:
            await asyncio.sleep(SAMPLE_S)
            if self._is_busy():
                await self.sample()

    async def sample(self) -> None:
        """Note how all servers are now; one that does not answer is left to the requests, which fail."""
        answers = await asyncio.gather(
            *(self._client.ask("GET", f"{url}/metrics") for url in self._urls), return_exceptions=True
        )
        now = {}
        for url, answer in zip(self._urls, answers, strict=True):
            if isinstance(answer, str):
                now[url] = read_metrics(answer)
            elif not isinstance(answer, RunError):
                assert isinstance(answer, BaseException)
                raise answer
        if now:
            self._stats.observe(
                int(sum(each["running"] for each in now.values())),
                int(sum(each["waiting"] for each in now.values())),
                max(each["kv_cache_use"] for each in now.values()),
            )
        for url, each in now.items():
            before = self._before.get(url, each)
            for name in COUNTERS:
                setattr(self._stats, name, getattr(self._stats, name) + int(each[name] - before[name]))
        self._before |= now
