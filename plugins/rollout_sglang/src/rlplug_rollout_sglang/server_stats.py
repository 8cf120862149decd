"""What SGLang's servers tell of their schedulers."""

from __future__ import annotations

from typing import Any

from rlplug.rollout.servers.scheduler_metrics import SchedulerMetrics, SchedulerState


class LoadSampler(SchedulerMetrics):
    """Reads ``/v1/loads``. What prefix cache and preemptions did comes with each completion."""

    route = "v1/loads?include=core"

    def read(self, answer: Any) -> SchedulerState:
        loads = answer["loads"]
        return SchedulerState(
            running=sum(load["num_running_reqs"] for load in loads),
            waiting=sum(load["num_waiting_reqs"] for load in loads),
            kv_cache_use=max(load["token_usage"] for load in loads),
        )
