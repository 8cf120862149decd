"""Turns what the sides of the step benchmark printed into a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from step_work import Work, Workload

PHASES = ("wake", "sync", "rollout", "rewards", "logprobs", "update", "sleep")
IN_RLPLUG = {"rollout": "generate"}
"""A step's phase ``rollout`` holds wake, sync and sleep too."""
IN_TRL = {"sync": "sync_weights", "rollout": "generate", "rewards": "_calculate_rewards"}
"""Phases that TRL's own profiler distinguishes; a phase without a name there stays empty."""


def summary(rows: Sequence[dict[str, Any]], warm_up: int) -> dict[str, Any]:
    """Return medians over the steps after ``warm_up``, of seconds and phases, and the highest peak in GiB."""
    counted = [row for row in rows if row["step"] > warm_up]
    if not counted:
        return {}
    names = {name for row in counted for name in row["phases"]}
    return {
        "steps": len(counted),
        "seconds": statistics.median(row["seconds"] for row in counted),
        "phases": {name: statistics.median(row["phases"].get(name, 0.0) for row in counted) for name in names},
        "peak": max((peak for row in counted for peak in row["peaks"].values()), default=float("nan")),
    }


def markdown(
    workload: Workload, found: dict[str, dict[str, Any]], parts: dict[str, float], ceilings: dict[str, float]
) -> str:
    """Return a table with a column for each side, the bare parts and the floor.

    Args:
        workload: What was done.
        found: The :func:`summary` of each side.
        parts: Seconds of the bare ``rollout`` and ``update``, without what was not measured.
        ceilings: ``matmul`` in FLOP/s and ``copy`` in bytes/s of one GPU, and the number of ``gpus``.
    """
    work = Work.of(workload, int(ceilings["gpus"]))
    columns = {side: _of_side(workload, result, work, ceilings, side == "rlplug") for side, result in found.items()}
    if parts:
        columns["bare parts"] = {name: f"{seconds:.2f}" for name, seconds in parts.items()}
        if len(parts) == 2:
            columns["bare parts"]["**step, s**"] = f"{sum(parts.values()):.2f}"
    rollout = work.decoded_bytes / ceilings["copy"] + work.prompt_flops / ceilings["matmul"]
    floor = {"rollout": rollout, "update": work.update_flops / ceilings["matmul"]}
    columns["floor"] = {name: f"{seconds:.2f}" for name, seconds in floor.items()}
    columns["floor"]["**step, s**"] = f"{sum(floor.values()):.2f}"
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = [f"| | {' | '.join(columns)} |", f"|-|{'-|' * len(columns)}"]
    lines += [f"| {name} | {' | '.join(column.get(name, '') for column in columns.values())} |" for name in names]
    return "\n".join(lines)


def _of_side(
    workload: Workload, result: dict[str, Any], work: Work, ceilings: dict[str, float], is_rlplug: bool
) -> dict[str, str]:
    phases, seconds = result["phases"], result["seconds"]
    lengths = workload.lengths()
    column = {
        "**step, s**": f"{seconds:.2f} ({result['steps']} steps)",
        "tokens/s": f"{(sum(lengths) + workload.prompt * len(lengths)) / seconds:,.0f}",
    }
    names = {name: name for name in PHASES} | IN_RLPLUG if is_rlplug else IN_TRL
    for name in PHASES:
        key = names.get(name)
        if key is not None and key in phases:
            column[name] = f"{phases[key]:.3f}" if phases[key] < 1 else f"{phases[key]:.2f}"
    if is_rlplug:
        rollout, update = phases["generate"], phases["update"]
        column["neither rollout nor update"] = f"{1 - (rollout + update) / seconds:.1%}"
        column["update, of the matrix-product ceiling (MFU)"] = f"{work.update_flops / update / ceilings['matmul']:.0%}"
        column["rollout, of the copy bandwidth"] = f"{work.decoded_bytes / rollout / ceilings['copy']:.0%}"
    named = [phases.get(names[name], 0.0) for name in ("sync", "rollout", "rewards")]
    column["all but sync, rollout, rewards"] = f"{seconds - sum(named):.2f}"
    column["GPU memory, peak GiB"] = f"{result['peak']:.1f}"
    return column
