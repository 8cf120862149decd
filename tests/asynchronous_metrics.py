"""What the files of a run must say that generated while its policy trained."""

from __future__ import annotations

import json
from pathlib import Path

from rlplug.observability.metrics_log import read_metrics


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """Return the rows of ``metrics.jsonl``, none where there is no such file yet."""
    return read_metrics(folder / "metrics.jsonl")


def check_bound(folder: Path, num_steps: int, bound: int, prompts_per_step: int) -> None:
    """Each step has its groups, none too old, none twice, and no prompt of the first epoch trains in two steps."""
    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert max(row["partial/staleness_max"] for row in rows) == bound
    assert all(row["filter/missing_share"] == 0 for row in rows)
    assert all(row["partial/groups_in_flight"] == bound * prompts_per_step for row in rows)
    steps = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, num_steps + 1))
    groups = [group for step in steps for take in step["groups"] for group in take]
    assert len(set(groups)) == len(groups) == num_steps * prompts_per_step
    with (folder / "samples.jsonl").open() as file:
        trained = {(line["step"], line["prompt_uid"]) for line in map(json.loads, file) if line["phase"] == "train"}
    assert len({uid for _, uid in trained}) == len(trained)


def check_validations(folder: Path, steps: list[int], broken_off: list[int]) -> None:
    """Each of ``steps`` was validated once, with the policy that it left; the steps after all waited for that."""
    rows = {row["step"]: row for row in metrics_of(folder)}
    assert [step for step, row in rows.items() if "validate/reward_mean" in row] == steps
    assert [step - 1 for step, row in rows.items() if "partial/validation_wait_s" in row] == broken_off + steps
    with (folder / "samples.jsonl").open() as file:
        found = [line for line in map(json.loads, file) if line["phase"] == "validate"]
    assert {line["step"]: line["policy_version"] for line in found} == {step: step for step in steps}
    with (folder / "groups.jsonl").open() as file:
        timelines = {line["step"]: line["timeline"] for line in map(json.loads, file)}
    beside = [step for step, seen in timelines.items() if any(held_out for _, _, held_out in seen["requests"])]
    assert beside == [step + 1 for step in broken_off + steps]
    assert all({name for name, _, _ in seen["phases"]} >= {"rollout", "update"} for seen in timelines.values())
    assert all("weight sync" in dict(map(reversed, seen["engine"])) for seen in timelines.values())
    assert len({(line["step"], line["index"], line["prompt_uid"]) for line in found}) == len(found)
