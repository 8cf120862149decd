"""An engine's counters, and what they suggest to set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

ROOM: Final = 0.5
"""A KV cache that was never fuller than this has room for more requests."""

FULL: Final = 0.9
"""Requests that wait beside a KV cache that is fuller than this wait for room in it."""

BUSY: Final = 0.9
"""A process that uses more than this share of a core may hold back what it hands over."""

LEAST_S: Final = 1.0
"""Least time of rollouts, in seconds, that says how busy a process is."""


@dataclass
class EngineStats:
    """Counters since they were drained last, and the settings that they speak of."""

    max_num_seqs: int
    kv_cache_tokens: int
    max_num_seqs_key: str = "rollout.max_num_seqs"
    """The option that says how many requests run at once, for advice."""
    memory_key: str = "rollout.gpu_memory_utilization (or kv_cache_gib)"
    """The option that makes the KV cache larger, for advice."""
    api_processes_key: str = ""
    """The option that says how many processes of a server answer requests, for advice."""
    observes_scheduler: bool = True
    """Whether the scheduler and the prefix cache are observed. Without it the metrics have tokens alone: a zero for the
    others would be wrong."""
    num_tokens: int = 0
    seconds: float = 0.0
    kv_cache_use: float = 0.0
    """Largest share of the KV cache that was in use."""
    running: int = 0
    """Most requests that ran at once."""
    waiting: int = 0
    """Most requests that waited at once."""
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    waited_for_slots: int = 0
    """Most requests that waited while ``max_num_seqs`` ran."""
    waited_for_cache: int = 0
    """Most requests that waited while the KV cache was full."""
    api_cpu: float | None = None
    """Share of a core that the busiest process used that answers requests; ``None`` where it is not measured."""
    _advice: list[str] = field(default_factory=list)

    def observe(self, running: int, waiting: int, kv_cache_use: float) -> None:
        """Note the state of the scheduler at some moment."""
        assert self.observes_scheduler
        self.running = max(self.running, running)
        self.waiting = max(self.waiting, waiting)
        self.kv_cache_use = max(self.kv_cache_use, kv_cache_use)
        if running >= self.max_num_seqs:
            self.waited_for_slots = max(self.waited_for_slots, waiting)
        if kv_cache_use > FULL:
            self.waited_for_cache = max(self.waited_for_cache, waiting)

    def drain(self) -> dict[str, float]:
        """Return the metrics, keep what they suggest, and count anew."""
        metrics = {
            "num_tokens": float(self.num_tokens),
            "tokens_per_s": self.num_tokens / max(self.seconds, 1e-9),
        }
        if self.observes_scheduler:
            metrics |= {
                "prefix_cache_hits": self.cached_prompt_tokens / max(self.prompt_tokens, 1),
                "kv_cache_use": self.kv_cache_use,
                "running": float(self.running),
                "waiting": float(self.waiting),
                "preemptions": float(self.preemptions),
            }
        if self.api_cpu is not None:
            metrics["api_cpu"] = self.api_cpu
        self._advice = self._suggest() if self.num_tokens and self.observes_scheduler else []
        self.num_tokens = self.running = self.waiting = self.preemptions = 0
        self.prompt_tokens = self.cached_prompt_tokens = self.waited_for_slots = self.waited_for_cache = 0
        self.seconds = self.kv_cache_use = 0.0
        self.api_cpu = None
        return metrics

    def advice(self) -> list[str]:
        """Return what the counters that were drained last suggest."""
        return self._advice

    def _suggest(self) -> list[str]:
        return self._suggest_for_scheduler() + self._suggest_for_api()

    def _suggest_for_api(self) -> list[str]:
        if self.api_cpu is None or self.api_cpu <= BUSY or self.seconds < LEAST_S:
            return []
        rate = f"{self.num_tokens / max(self.seconds, 1e-9):,.0f} tokens/s"
        return [
            f"a process that answers requests used {self.api_cpu:.0%} of a core to hand over {rate}, and may hold back "
            f"more: raise {self.api_processes_key}."
        ]

    def _suggest_for_scheduler(self) -> list[str]:
        full = f"KV cache {self.kv_cache_use:.0%} full"
        if self.preemptions:
            return [
                f"{full}, {self.preemptions} preemptions, each of which computes a request anew: raise "
                f"{self.memory_key}, or lower {self.max_num_seqs_key} from {self.max_num_seqs}."
            ]
        if self.waited_for_cache:
            return [
                f"{full}, {self.waited_for_cache} requests waited for room among {self.kv_cache_tokens:,} tokens: "
                f"raise {self.memory_key}."
            ]
        if self.waited_for_slots and self.kv_cache_use < ROOM:
            return [
                f"{full}, 0 preemptions, {self.waited_for_slots} requests waited: raise {self.max_num_seqs_key} from "
                f"{self.max_num_seqs}."
            ]
        return []
