"""An engine's counters, as metrics; :mod:`~rlplug_engines.colocated.scheduler_advice` says what they suggest to set."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from rlplug_engines.colocated.scheduler_advice import FULL, LEAST_OBSERVATIONS, RECENT, AdviceKeys, suggest

BUSY: Final = 0.9
"""A process that uses more than this share of a core may hold back what it hands over."""

LEAST_S: Final = 1.0
"""Least time of rollouts, in seconds, that says how busy a process is."""


@dataclass
class EngineStats:
    """Counters since they were drained last, and the settings that they speak of."""

    max_num_seqs: int
    """Over all ``copies``."""
    kv_cache_tokens: int
    """Over all ``copies``."""
    keys: AdviceKeys = field(default_factory=AdviceKeys)
    observes_scheduler: bool = True
    """Whether the scheduler and the prefix cache are observed. Without it the metrics have tokens alone: a zero for the
    others would be wrong."""
    max_num_batched_tokens: int = 0
    """Most tokens of one forward pass of a copy; 0 where that is not known, or has no limit."""
    largest_graph: int = 0
    """Largest batch of a copy that has a CUDA graph; 0 where that is not known, or there are none."""
    copies: int = 1
    """Copies of the model that the counters are of."""
    num_tokens: int = 0
    aborted: int = 0
    """Requests that were broken off; of each, servers lose the tokens that they had not sent."""
    received_tokens: int = 0
    """Tokens that servers sent, those of requests that still run too."""
    generated_tokens: int = 0
    """Tokens that servers generated, by their own counters; 0 where they have none."""
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
    fitted: int = 0
    """Fewest requests that ran while the KV cache was full; 0 while it never was."""
    api_cpu: float | None = None
    """Share of a core that the busiest process used that answers requests; ``None`` where it is not measured."""
    handed_over: int = 0
    """Most requests that the engine had at once, whether they ran or waited."""
    observations: int = 0
    """Times that the scheduler was looked at while it had requests."""
    recent_use: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """``kv_cache_use`` of the newest rollouts with enough observations, this one included."""
    _unsent: int = 0
    """Tokens that were received in this count and generated in the last one, below 0."""
    _at_slots: int = 0
    _at_cache: int = 0
    _at_prefill: int = 0
    _at_graphs: int = 0
    _advice: list[str] = field(default_factory=list)

    def observe(self, running: int, waiting: int, kv_cache_use: float) -> None:
        """Note the state of the scheduler at some moment: after each step, or at equal intervals."""
        assert self.observes_scheduler
        self.running = max(self.running, running)
        self.waiting = max(self.waiting, waiting)
        self.kv_cache_use = max(self.kv_cache_use, kv_cache_use)
        has_slots, is_full = running < self.max_num_seqs, kv_cache_use > FULL
        if not has_slots:
            self.waited_for_slots = max(self.waited_for_slots, waiting)
        if is_full:
            self.waited_for_cache = max(self.waited_for_cache, waiting)
            self.fitted = min(self.fitted or running, running)
        self.observations += running + waiting > 0
        self._at_cache += waiting > 0 and is_full
        self._at_slots += waiting > 0 and not is_full and not has_slots
        # of several copies one may have all of its slots taken, and the others have some
        self._at_prefill += waiting > 0 and not is_full and running < self.max_num_seqs // self.copies
        self._at_graphs += 0 < self.largest_graph * self.copies < running

    def drain(self) -> dict[str, float]:
        """Return the metrics, keep what they suggest, and count anew."""
        metrics = {
            "num_tokens": float(self.num_tokens),
            "aborted": float(self.aborted),
            "tokens_per_s": self.num_tokens / max(self.seconds, 1e-9),
        }
        if self.generated_tokens:  # what was on its way to a request that still runs is received in the next count
            unsent = self._unsent + self.generated_tokens - self.received_tokens
            metrics["lost_tokens"], self._unsent = float(max(0, unsent)), min(0, unsent)
        if self.observes_scheduler:
            metrics |= {
                "prefix_cache_hits": self.cached_prompt_tokens / max(self.prompt_tokens, 1),
                "kv_cache_use": self.kv_cache_use,
                "running": float(self.running),
                "waiting": float(self.waiting),
                "preemptions": float(self.preemptions),
                "waits_for_slots": self._share(self._at_slots),
                "waits_for_cache": self._share(self._at_cache),
                "waits_for_prefill": self.waits_for_prefill,
            }
            if self.largest_graph:
                metrics["beyond_graphs"] = self.beyond_graphs
        if self.api_cpu is not None:
            metrics["api_cpu"] = self.api_cpu
        self._advice = self._suggest_for_api() if self.num_tokens else []
        if self.observations >= LEAST_OBSERVATIONS:
            self.recent_use.append(self.kv_cache_use)
        if self.num_tokens:
            self._advice = suggest(self) + self._advice
        self._reset()
        return metrics

    def advice(self) -> list[str]:
        """Return what the counters that were drained last suggest."""
        return self._advice

    @property
    def waits_for_prefill(self) -> float:
        """Share of the observations in which requests waited, and neither for slots nor for the KV cache."""
        return self._share(self._at_prefill)

    @property
    def beyond_graphs(self) -> float:
        """Share of the observations with more requests than the largest batch that has a CUDA graph."""
        return self._share(self._at_graphs)

    def _share(self, count: int) -> float:
        return count / max(self.observations, 1)

    def _reset(self) -> None:
        self.num_tokens = self.aborted = self.running = self.waiting = self.preemptions = self.fitted = 0
        self.generated_tokens = self.received_tokens = self.handed_over = 0
        self.prompt_tokens = self.cached_prompt_tokens = self.waited_for_slots = self.waited_for_cache = 0
        self.observations = self._at_slots = self._at_cache = self._at_prefill = self._at_graphs = 0
        self.seconds = self.kv_cache_use = 0.0
        self.api_cpu = None

    def _suggest_for_api(self) -> list[str]:
        if self.api_cpu is None or self.api_cpu <= BUSY or self.seconds < LEAST_S:
            return []
        rate = f"{self.num_tokens / max(self.seconds, 1e-9):,.0f} tokens/s"
        return [
            f"a process that answers requests used {self.api_cpu:.0%} of a core to hand over {rate}, and may hold back "
            f"more: raise {self.keys.api_processes}."
        ]
