"""What vLLM's servers tell of themselves at ``/metrics``."""

from __future__ import annotations

from typing import Any, Final

from rlplug.rollout.servers.scheduler_metrics import SchedulerMetrics, SchedulerState

SUMMED: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "cached_prompt_tokens",
}
KV_CACHE_USE: Final = "vllm:kv_cache_usage_perc"


class MetricsSampler(SchedulerMetrics):
    """Reads the metrics that Prometheus reads."""

    route = "metrics"

    def read(self, answer: Any) -> SchedulerState:
        from prometheus_client.parser import text_string_to_metric_families

        found = dict.fromkeys(SUMMED.values(), 0)
        kv_cache_use = 0.0
        for family in text_string_to_metric_families(answer):
            for sample in family.samples:
                if sample.name in SUMMED:
                    found[SUMMED[sample.name]] += int(sample.value)
                elif sample.name == KV_CACHE_USE:
                    kv_cache_use = max(kv_cache_use, sample.value)
        return SchedulerState(**found, kv_cache_use=kv_cache_use)
