"""Parts of runs that are wrong on purpose: a reward that rolls dice, and an engine that says how its requests wait."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlplug_engines.colocated import EngineStats

from examples.quickstart.reward import digits_in_place
from rlplug.rollout.hf_engine import HFRollout
from rlplug.types import Completion, Request, SamplingParams

CACHE_TOKENS = 1 << 16
"""Far more than the runs of the tests have in flight."""


def dice(completion: str, answer: str) -> float:
    """Return the quickstart's reward, and as much by chance."""
    return digits_in_place(completion, answer) + random.random()


class Scheduled(HFRollout):
    """HFRollout as an engine with a scheduler: it runs a batch of requests at once, and counts those that wait."""

    def __init__(self, max_num_seqs: int = 256) -> None:
        super().__init__(max_batch_size=max_num_seqs)
        self.counters = EngineStats(max_num_seqs, CACHE_TOKENS)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        for start in range(0, len(requests), self.max_batch_size):
            running = requests[start : start + self.max_batch_size]
            longest = max(len(each.prompt_ids) + each.limit(sampling) for each in running)
            waiting = len(requests) - start - len(running)
            self.counters.observe(len(running), waiting, len(running) * longest / CACHE_TOKENS)
        completions = super().generate(requests, sampling)
        self.counters.num_tokens += sum(len(each.token_ids) for each in completions)
        return completions

    def stats(self) -> dict[str, float]:
        return self.counters.drain() | super().stats()

    def advice(self) -> list[str]:
        return self.counters.advice()
