"""An engine's counters become metrics and advice."""

from __future__ import annotations

import pytest
from rlplug_engines.colocated import AdviceKeys, EngineStats


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
        "aborted": 0.0,
        "tokens_per_s": 500.0,
        "kv_cache_use": 0.4,
        "running": 64.0,
        "waiting": 5.0,
        "preemptions": 0.0,
        "prefix_cache_hits": 0.75,
        "waits_for_slots": 1 / 3,
        "waits_for_cache": 0.0,
        "waits_for_prefill": 1 / 3,
    }
    assert not any(stats.drain().values())


KEYS = AdviceKeys(
    memory="rollout.mem_fraction_static from 0.5",
    idle_memory="rollout.mem_fraction_static from 0.5",
    requests="rollout.max_running_requests",
    prefill="rollout.chunked_prefill_size",
    admission="rollout.server_args.schedule_conservativeness to 0.3",
    graphs="rollout.cuda_graph_max_batch_size",
)
DECODES = [(48, 0, 0.6)] * 20
"""A rollout of which the scheduler makes the most: no request waits, and the KV cache is used."""
STATES = {
    # what was observed, the settings that differ, and parts of the advice
    "all is well": (DECODES, {}, ""),
    "prompts wait in the first steps alone": ([(16, 40, 0.1), (32, 20, 0.2), *DECODES], {}, ""),
    "slots are full, and so is the cache": ([(64, 90, 0.8)] * 20, {}, ""),
    "as many requests as slots": ([(64, 0, 0.7)] * 20, {}, ""),
    "most slots wait for the cache": (
        [(60, 30, 0.97), *DECODES],
        {},
        "97% full ... 30 requests waited for room among 10,000 tokens ... "
        "raise rollout.mem_fraction_static from 0.5 ... 15,000 tokens hold them all",
    ),
    "the cache is lost and computed anew": (
        [(64, 30, 0.99), (50, 44, 0.95)],
        {"preemptions": 3},
        "99% full ... 3 preemptions ... raise rollout.mem_fraction_static from 0.5 ... "
        "lower rollout.max_running_requests from 64 to 50",
    ),
    "slots are full, the cache is half empty": (
        [(64, 448, 0.55), *DECODES],
        {},
        "60% full ... 448 requests waited ... raise rollout.max_running_requests from 64 to 96",
    ),
    "slots are full, the cache is nearly empty": (
        [(64, 9, 0.12)],
        {},
        "12% full ... 0 preemptions ... raise rollout.max_running_requests from 64 to 73",
    ),
    "prompts wait for their turn": (
        [(16, 400, 0.12)] * 20,
        {"max_num_batched_tokens": 2048},
        "12% full ... 100% of the time ... 400 waited ... raise rollout.chunked_prefill_size from 2048 to 16384 ... "
        "set rollout.server_args.schedule_conservativeness to 0.3",
    ),
    "a pass is large, and the engine shy": (
        [(16, 400, 0.12)] * 20,
        {"max_num_batched_tokens": 16384},
        "their prompts' turn: set rollout.server_args.schedule_conservativeness to 0.3",
    ),
    "memory idles": (
        [(48, 0, 0.05)] * 20,
        {"rollouts": 3},
        "at most 5.0% full ... 1,000 of its 10,000 tokens ... Lower rollout.mem_fraction_static from 0.5 ... "
        "18 times as many completions (model.batch.prompts_per_step)",
    ),
    "memory idles in a validation": ([(48, 0, 0.05)] * 20, {}, ""),
    "batches are larger than any graph": (
        [(50, 0, 0.6)] * 20,
        {"largest_graph": 32},
        "100% of the time more than 32 requests ... raise rollout.cuda_graph_max_batch_size to 64",
    ),
    "one batch is larger than any graph": ([(50, 0, 0.6), *[(30, 0, 0.6)] * 19], {"largest_graph": 32}, ""),
    "the largest batch has a graph": (DECODES, {"largest_graph": 48}, ""),
    "too few observations": ([(16, 400, 0.05)] * 9, {"largest_graph": 8, "rollouts": 3}, ""),
    "one of two copies may have no slot": ([(40, 10, 0.3)] * 20, {"copies": 2, "max_num_batched_tokens": 2048}, ""),
    "both copies have slots": (
        [(20, 10, 0.3)] * 20,
        {"copies": 2, "max_num_batched_tokens": 2048},
        "raise rollout.chunked_prefill_size from 2048 to 16384",
    ),
    "settings of two copies": (
        [(64, 448, 0.3), *[(64, 448, 0.3)] * 19],
        {"copies": 2, "largest_graph": 16},
        "raise rollout.max_running_requests from 32 to 96 ... cuda_graph_max_batch_size to 32",
    ),
}
"""States of a scheduler with 64 slots and a KV cache of 10,000 tokens."""


@pytest.mark.parametrize(("observations", "settings", "words"), STATES.values(), ids=STATES)
def test_advice_by_state(observations, settings, words):
    """It catches a state without advice, advice with another key or value, and advice where all is well."""
    rollouts, preemptions = settings.get("rollouts", 1), settings.get("preemptions", 0)
    fields = {name: value for name, value in settings.items() if name not in ("rollouts", "preemptions")}
    stats = EngineStats(64, 10_000, KEYS, **fields)
    for _ in range(rollouts):
        stats.num_tokens, stats.preemptions = 1000, preemptions
        for observation in observations:
            stats.observe(*observation)
        stats.drain()
    advice = " ".join(stats.advice())
    assert all(word in advice for word in words.split(" ... ")), advice
    assert bool(advice) == bool(words), advice


def test_an_engine_that_tells_nothing_is_given_as_many_slots_as_requests():
    """Catches TensorRT-LLM with eight slots for hundreds of requests, of which nothing was said."""
    stats = EngineStats(8, 0, AdviceKeys(requests="rollout.max_batch_size"), observes_scheduler=False)
    for handed_over, said in ((8, []), (200, ["had 200 requests at once, and runs 8", "max_batch_size from 8 to 200"])):
        stats.num_tokens, stats.handed_over = 1, handed_over
        stats.drain()
        advice = " ".join(stats.advice())
        assert all(words in advice for words in said), advice
        assert bool(advice) == bool(said)
    assert stats.handed_over == 0


def test_values_of_servers_that_run_already_are_not_known():
    """It catches the value of an option of ours that is said to be a server's."""
    assert KEYS.of_servers().memory == "the servers' mem_fraction_static"
    assert KEYS.of_servers().admission == "the servers' server_args.schedule_conservativeness to 0.3"


def test_what_an_engine_has_not_is_not_named():
    """It catches advice without a key, such as an engine on a CPU gives that has one forward pass for a prompt."""
    stats = EngineStats(64, 10_000, AdviceKeys(prefill=""), max_num_batched_tokens=2048, largest_graph=8)
    stats.num_tokens = 1
    for _ in range(20):
        stats.observe(16, 400, 0.05)
    stats.drain()
    assert stats.advice() == []


def test_advice_names_the_options_of_the_engine():
    keys = AdviceKeys(requests="rollout.max_running_requests", memory="rollout.mem_fraction_static from 0.5")
    stats = EngineStats(8, 1000, keys)
    stats.num_tokens = 1
    stats.observe(8, 3, 0.1)
    stats.drain()
    assert "raise rollout.max_running_requests from 8" in stats.advice()[0]
    stats.num_tokens = 1
    stats.observe(8, 3, 0.95)
    stats.drain()
    assert "raise rollout.mem_fraction_static" in stats.advice()[0]


def test_a_busy_process_that_answers_requests_is_named():
    stats = EngineStats(8, 1000, AdviceKeys(api_processes="rollout.api_server_count"))
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
    assert stats.drain() == {"num_tokens": 100.0, "aborted": 0.0, "tokens_per_s": 50.0}
    assert stats.advice() == []
