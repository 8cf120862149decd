"""Names of a run's metrics in Prometheus: one rule for all of them, which the dashboard follows too."""

from __future__ import annotations

import re
from typing import Final

PREFIX: Final = "rlplug_"

PHASE_SECONDS: Final = "rlplug_phase_seconds"
PHASE_MEMORY: Final = "rlplug_phase_memory_bytes"
STEP_SECONDS: Final = "rlplug_step_seconds"
STEP: Final = "rlplug_step"
LAST_STEP_TIME: Final = "rlplug_last_step_timestamp_seconds"
LEFT_OUT: Final = "rlplug_metrics_left_out"

COUNTERS: Final = {
    "steps": "RL steps that ended, those that a resumed run repeats included.",
    "tokens": "Tokens of completions in these steps.",
    "samples": "Completions in these steps.",
    "errors": "What went wrong in these steps, by kind.",
}
"""Counters and their help; Prometheus knows them as ``rlplug_<name>_total``."""

ERROR_KINDS: Final = ("reward", "environment", "skipped_update")
"""Values of the label ``kind`` of errors, one of a completion: those whose reward failed, those whose environment did,
and updates that were not finite."""

_RESERVED: Final = re.compile(
    r"rlplug_(?:(?:steps|tokens|samples|errors)(?:_total|_created)?"
    r"|phase_seconds|phase_memory_bytes|step_seconds|step|last_step_timestamp_seconds|metrics_left_out)"
)


def series_of(metric: str) -> tuple[str, str | None]:
    """Return the name of a metric's series and, where phases share a name, its phase.

    ``time/<phase>`` and ``memory/<phase>`` are one name each, with a label. Of any other name each run of characters
    but ASCII letters and digits becomes an underscore: ``validate/pass@1`` is ``rlplug_validate_pass_1``. Names that
    become equal keep series of their own, since each has the metric's own name as the label ``metric``.
    """
    if metric == "time/step":
        return STEP_SECONDS, None
    kind, _, phase = metric.partition("/")
    if phase and kind in ("time", "memory"):
        return (PHASE_SECONDS if kind == "time" else PHASE_MEMORY), phase
    name = PREFIX + re.sub(r"[^a-zA-Z0-9]+", "_", metric).strip("_")
    if name == PREFIX or _RESERVED.fullmatch(name):  # of text without a letter, or a name that something else has
        name = f"{PREFIX}metric_{name.removeprefix(PREFIX)}".rstrip("_")
    return name, None


def query_of(metric: str, selector: str) -> str:
    """Return the PromQL query of a metric, such as ``rlplug_reward_mean{run=~"$run"}``.

    Args:
        metric: Name of the metric.
        selector: Further conditions on labels, ``run=~"$run"``.
    """
    name, phase = series_of(metric)
    conditions = selector if phase is None else f'{selector},phase="{phase}"'
    return f"{name}{{{conditions}}}"
