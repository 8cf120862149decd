"""Advice on rollout engines: what requests waited for, what was computed anew or slowly, and memory that idles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import Any, Final

from rlplug_watch.measures import Advice, is_on_gpu, late_mean
from rlplug_watch.report.run_data import Metrics

OFTEN: Final = 0.2
"""Share of the rollout's time in which requests wait, or batches have no CUDA graph, that matters. A choice."""
ROOM: Final = 0.72
"""Share of the KV cache in use up to which a quarter more requests fit into 90% of it."""
IDLE: Final = 0.1
"""Share of the KV cache in use below which most of it serves nothing. A choice."""


def _preemptions(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    preemptions = metrics.series("rollout/preemptions").values
    if preemptions and (count := fmean(preemptions)) >= 1:
        yield Advice(
            f"{count:.0f} requests a step were preempted for lack of KV cache, and computed anew. Give the engine more "
            "memory, or let fewer requests run at once.",
            "model.rollout.init_args",
            "rollout-engines.md#tune-it",
        )


def _waits(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    use = late_mean(metrics, "rollout/kv_cache_use")
    shares = {what: late_mean(metrics, f"rollout/waits_for_{what}") or 0.0 for what in ("cache", "slots", "prefill")}
    cause, share = max(shares.items(), key=lambda item: item[1])
    if use is None or share <= OFTEN or (cause == "slots" and use > ROOM):
        return
    text, key = {
        "cache": (
            "for room in it. Give the engine more memory.",
            "model.rollout.init_args.gpu_memory_utilization",
        ),
        "slots": (
            "while as many ran as may. Let more run at once.",
            "model.rollout.init_args.max_num_seqs",
        ),
        "prefill": (
            "for their prompts' turn. Let a forward pass have 16,384 tokens, if it has less (SGLang: or lower "
            "schedule_conservativeness).",
            "model.rollout.init_args.max_num_batched_tokens",
        ),
    }[cause]
    yield Advice(
        f"In {share:.0%} of the rollout's time requests waited, with the KV cache at most {use:.0%} full, {text}",
        key,
        "rollout-engines.md#tune-it",
    )


def _no_graphs(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    if (share := late_mean(metrics, "rollout/beyond_graphs") or 0.0) > OFTEN:
        most = max(metrics.series("rollout/running").values, default=0.0)
        yield Advice(
            f"In {share:.0%} of the rollout's time more requests ran, up to {most:.0f}, than the largest batch with a "
            "CUDA graph. Capture larger ones (vLLM: engine_args.max_cudagraph_capture_size, SGLang: "
            "cuda_graph_max_batch_size).",
            "model.rollout.init_args",
            "rollout-engines.md#tune-it",
        )


def _idle_memory(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    uses, waits = (metrics.series(f"rollout/{name}").values for name in ("kv_cache_use", "waits_for_slots"))
    if is_on_gpu(info) and uses and max(uses) < IDLE and not any(waits):
        yield Advice(
            f"The engine's KV cache was at most {max(uses):.1%} full, and no request waited for a slot. Let a step "
            "have more completions, or give the engine less memory where it stays awake in the update.",
            "model.batch.prompts_per_step",
            "rollout-engines.md#tune-it",
        )


ENGINE_RULES: Final[tuple[Callable[[Metrics, Mapping[str, Any]], Iterator[Advice]], ...]] = (
    _preemptions,
    _waits,
    _no_graphs,
)
"""From what is computed twice to what is computed slowly."""
IDLE_RULES: Final = (_idle_memory,)
"""What costs no time."""
