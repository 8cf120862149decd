"""An engine's counters become metrics and advice."""

from __future__ import annotations

import pytest
from rlplug_engines.colocated.stats import EngineStats


def make_stats(*observations, preemptions=0):
    stats = EngineStats(max_num_seqs=64, kv_cache_tokens=10_000)
    stats.num_tokens, stats.seconds = 1000, 2.0
    stats.prompt_tokens, stats.cached_prompt_tokens, stats.preemptions = 400, 300, preemptions
    for observation in observations:
        stats.observe(*observation)
    return stats, stats.drain()


def test_statistics_are_peaks_and_rates():
    stats, metrics = make_stats((10, 5, 0.2), (64, 3, 0.4), (1, 0, 0.1))
    assert metrics == {
        "num_tokens": 1000.0,
        "tokens_per_s": 500.0,
        "kv_cache_use": 0.4,
        "running": 64.0,
        "waiting": 5.0,
        "preemptions": 0.0,
        "prefix_cache_hits": 0.75,
    }
    assert not any(stats.drain().values())


@pytest.mark.parametrize(
    ("observations", "preemptions", "words"),
    [
        ([(64, 9, 0.12)], 0, ["KV cache 12% full", "0 preemptions", "raise rollout.max_num_seqs from 64"]),
        ([(64, 9, 0.95)], 3, ["95% full", "3 preemptions", "lower rollout.max_num_seqs from 64"]),
        ([(30, 9, 0.97)], 0, ["9 requests waited", "10,000 tokens", "raise rollout.gpu_memory_utilization"]),
        ([(64, 0, 0.12)], 0, None),
        ([(64, 9, 0.7)], 0, None),
        ([(20, 9, 0.1), (64, 0, 0.2)], 0, None),  # they waited for their prompts' turn alone
    ],
)
def test_advice(observations, preemptions, words):
    stats, _ = make_stats(*observations, preemptions=preemptions)
    if words is None:
        assert stats.advice() == []
    else:
        (advice,) = stats.advice()
        assert all(word in advice for word in words), advice


def test_advice_names_the_options_of_the_engine():
    stats = EngineStats(
        8, 1000, max_num_seqs_key="rollout.max_running_requests", memory_key="rollout.mem_fraction_static"
    )
    stats.num_tokens = 1
    stats.observe(8, 3, 0.1)
    stats.drain()
    assert "raise rollout.max_running_requests from 8" in stats.advice()[0]
    stats.num_tokens = 1
    stats.observe(8, 3, 0.95)
    stats.drain()
    assert "raise rollout.mem_fraction_static" in stats.advice()[0]


def test_a_busy_process_that_answers_requests_is_named():
    stats = EngineStats(8, 1000, api_processes_key="rollout.api_server_count")
    said = ["97% of a core", "13,000 tokens/s", "raise rollout.api_server_count"]
    for cpu, seconds, words in ((0.97, 2.0, said), (0.6, 2.0, []), (0.97, 0.5, [])):
        stats.num_tokens, stats.seconds, stats.api_cpu = 26_000, seconds, cpu
        assert stats.drain()["api_cpu"] == cpu
        advice = " ".join(stats.advice())
        assert all(word in advice for word in words), advice
        assert bool(advice) == bool(words)
    assert "api_cpu" not in stats.drain()


def test_what_an_engine_cannot_know_is_left_out():
    stats = EngineStats(8, 1000, observes_scheduler=False)
    stats.num_tokens, stats.seconds, stats.prompt_tokens, stats.cached_prompt_tokens = 100, 2.0, 8, 2
    assert stats.drain() == {"num_tokens": 100.0, "tokens_per_s": 50.0}
    assert stats.advice() == []
