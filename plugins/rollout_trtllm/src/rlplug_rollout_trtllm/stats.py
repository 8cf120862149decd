"""What is counted of an engine: tokens and time. What TensorRT-LLM's scheduler does is not looked at."""

from __future__ import annotations

from rlplug.rollout.engines import EngineStats
from rlplug_rollout_trtllm.options import TRTLLMOptions


def made_stats(options: TRTLLMOptions) -> EngineStats:
    """Return counters for engines of these options."""
    return EngineStats(
        max_num_seqs=options.max_batch_size or 0,
        kv_cache_tokens=0,  # it is not told
        max_num_seqs_key="rollout.max_batch_size",
        memory_key="rollout.free_gpu_memory_fraction",
        observes_scheduler=False,
    )


def seen_metrics(stats: EngineStats) -> dict[str, float]:
    """Return the metrics that were counted, and count anew. A zero for what was not would be wrong."""
    metrics = stats.drain()
    return {name: metrics[name] for name in ("num_tokens", "tokens_per_s")}
