"""Advice on runs with known problems, which are in ``benchmarks/results``, and silence on sound ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from report_runs import lines_of
from rlplug_watch.advice import MOST, RULES, advise
from rlplug_watch.measures import Advice
from rlplug_watch.report.run_data import Metrics, read_metrics

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
GPU = {"device": "cuda:0", "gpu_gib": 140.0}

LR, TOKENS, REWARDS = "model.optimizer.init_args.lr", "model.sampling.max_new_tokens", "model.rewards"
ENGINE = "model.rollout.init_args"
WAITS = {"rollout__kv_cache_use": 0.5} | {f"rollout__waits_for_{what}": 0.1 for what in ("slots", "cache", "prefill")}
KL = "model.algorithm.init_args.kl_coefficient"
JUDGED = {
    "reward__judge": 5.0,
    "reward__judge__p10": 0.0,
    "reward__judge__p90": 10.0,
    "reward_counts__judge__requests": 8.0,
}
PROMPTS = "model.batch.prompts_per_step"
ENTROPY, ALGORITHM, DATA = "model.algorithm.init_args.entropy_coefficient", "model.algorithm", "data.train"


def metrics_of(num_steps: int = 40, **columns: Any) -> Metrics:
    """Return a sound run's metrics, with some columns replaced: a number or a function of the step."""
    rising = {
        "reward/mean": lambda step: 0.1 + 0.5 * step / num_steps,
        "reward/max": 1.0,
        "reward/std": 0.3,
        "reward/error_share": 0.0,
        "policy/lr": 1e-6,
        "policy/entropy": lambda step: 1.0 - 0.5 * step / num_steps,
        "policy/skipped_updates": 0.0,
        "completion/truncated_share": 0.02,
        "advantages/degenerate_groups": 0.3,
        "filter/rejected_groups": 0.0,
        "mismatch/mean": 0.02,
        "time/step": 10.0,
        "time/rollout": 5.0,
        "memory/update": 100.0,
    }
    columns = rising | {name.replace("__", "/"): value for name, value in columns.items()}
    values = {
        name: tuple(float(value(step)) if callable(value) else value for step in range(num_steps))
        for name, value in columns.items()
    }
    return Metrics(tuple(range(1, num_steps + 1)), values)


def keys(found: list[Advice]) -> list[str]:
    return [advice.key for advice in found]


def pass_rate(step: int) -> float:
    """Return a high quantile of a reward that is 0 or 1, of which more are 1 in later steps."""
    return float(step > 8)


def wobble(step: int) -> float:
    return 0.3 + 0.01 * (step % 3)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, []),
        ({"policy__lr": 0.0, "reward__mean": wobble}, [LR]),
        ({"policy__skipped_updates": lambda step: float(step == 3)}, [LR]),
        ({"reward__error_share": 0.02}, [REWARDS]),
        ({"reward__std": 0.0, "reward__mean": 0.0, "advantages__degenerate_groups": 1.0}, [REWARDS]),
        ({"completion__truncated_share": lambda step: 0.4 * (step > 20)}, [TOKENS]),
        ({"reward__mean": wobble}, ["model.batch.group_size"]),
        ({"reward__mean": lambda step: 0.8 - step / 100}, [LR]),
        ({"reward__mean": 0.95}, []),  # solved from the start, with groups that differ
        ({"reward__mean": wobble, "policy__entropy": lambda step: 2.0**-step}, [ENTROPY, "model.batch.group_size"]),
        ({"policy__entropy": lambda step: 2.0**-step}, []),  # the reward rises still
        ({"advantages__degenerate_groups": 0.8}, [ALGORITHM]),
        ({"advantages__degenerate_groups": 0.8, "reward__mean": 0.95}, [DATA]),
        ({"filter__rejected_groups": 0.8}, [DATA]),
        ({"mismatch__mean": lambda step: 0.002 + 0.02 * (step > 25)}, ["model.algorithm.init_args.correction"]),
        ({"mismatch__mean": lambda step: 1e-7 * 4**step * (step < 8) + 1e-4}, []),
        ({"partial__wait_s": 4.0, "partial__engine_idle_s": 1.0}, ["model.partial_rollout.max_staleness"]),
        (
            {"partial__wait_s": 4.0, "partial__engine_idle_s": 1.0, "rollout__api_cpu": 0.97},
            ["model.rollout.init_args"],
        ),
        ({"partial__wait_s": 1.0, "partial__engine_idle_s": 4.0}, ["trainer.devices"]),
        ({"time__prompts": 3.0, "data__num_read": 900.0}, ["data.train.init_args.streaming"]),
        ({"time__prompts": 1.0, "data__num_read": 900.0}, []),
        ({"time__prompts": 3.0}, []),  # its rows were read before the first step
        ({"rollout__preemptions": 7.0}, ["model.rollout.init_args"]),
        (WAITS | {"rollout__waits_for_slots": 0.5}, [f"{ENGINE}.max_num_seqs"]),
        (WAITS | {"rollout__waits_for_slots": 0.5, "rollout__kv_cache_use": 0.8}, []),  # little more fits
        (WAITS | {"rollout__waits_for_cache": 0.5, "rollout__kv_cache_use": 1.0}, [f"{ENGINE}.gpu_memory_utilization"]),
        (WAITS | {"rollout__waits_for_prefill": 0.5}, [f"{ENGINE}.max_num_batched_tokens"]),
        (WAITS | {"rollout__beyond_graphs": 0.5}, [ENGINE]),
        (WAITS | {"rollout__beyond_graphs": 0.1}, []),
        ({"rollout__kv_cache_use": 0.04, "rollout__waits_for_slots": 0.0}, [PROMPTS]),
        ({"rollout__kv_cache_use": lambda step: 0.04 + 0.5 * (step == 30)}, []),
        ({"time__rollout": 9.0}, ["model.rollout"]),
        ({"memory__update": 30.0}, ["model.batch.max_tokens_per_gpu"]),
        ({"reward__error_share": 0.02, "reward_errors__late": 0.015}, ["model.limits.reward_deadline_s"]),
        ({"reward__error_share": 0.02, "reward_errors__late": 0.005}, [REWARDS]),
        ({"reward__judge": 0.4, "reward__judge__noise": 0.3}, [REWARDS]),
        ({"reward__judge": 0.4, "reward__judge__noise": 0.1}, []),
        (JUDGED | {"reward__judge__ties": 0.6}, [REWARDS]),
        (JUDGED | {"reward__judge__ties": 0.6, "reward__judge__p10": 9.5}, []),  # it likes nearly all
        (JUDGED | {"reward__judge__ties": 0.6, "reward_counts__judge__comparisons": 9.0}, []),
        ({"reward__right": 0.4, "reward__right__ties": 0.9, "reward__right__p90": 1.0}, []),  # no judge
        (JUDGED | {"reward__right": 0.5, "reward__judge__p90": lambda step: 0.1 * step}, [REWARDS]),
        ({"reward__right": 0.5, "reward__all": 0.5, "reward__all__p10": 0.0, "reward__all__p90": pass_rate}, []),
        (JUDGED | {"reward__right": lambda step: 0.5 - step / 100}, []),
        (JUDGED | {"reward__right": lambda step: 0.5 - step / 100, "reward__judge": lambda step: step / 10}, [KL]),
        ({"reward__right": lambda step: 0.5 - step / 100, "reward__brief": lambda step: step / 10}, []),
    ],
)
def test_each_problem_has_its_advice(columns: dict[str, Any], expected: list[str]) -> None:
    assert keys(advise(metrics_of(**columns), GPU)) == expected


def test_a_value_stands_beside_a_key_where_it_can_be_taken_as_it_is() -> None:
    """A list of rewards of which one is noisy must not be replaced."""
    noisy = {"reward__judge": 0.4, "reward__judge__noise": 0.3}
    settings = [advise(metrics_of(**columns), GPU)[0].setting for columns in (noisy, noisy | {"reward__right": 0.4})]

    assert settings == ["model.rewards: MathVerify", "model.rewards"]


def test_speed_and_memory_are_judged_on_gpus_alone() -> None:
    assert advise(metrics_of(time__rollout=9.0, memory__update=0.5), {"device": "cpu"}) == []


def test_nothing_is_said_without_measurements() -> None:
    assert advise(Metrics((), {}), {}) == []
    short = {"num_steps": 19, "reward__mean": 0.3, "completion__truncated_share": 0.9, "reward__error_share": 0.9}
    assert keys(advise(metrics_of(**short), {})) == [REWARDS]  # too short to judge how it learns
    damaged = Metrics((1, 2), dict.fromkeys(metrics_of().columns, (None, None)))
    assert advise(damaged, {"device": 7, "gpu_gib": "x"}) == []


def test_there_are_at_most_five_pieces() -> None:
    everything: dict[str, Any] = {
        "policy__skipped_updates": 1.0,
        "reward__error_share": 0.5,
        "completion__truncated_share": 0.5,
        "reward__mean": wobble,
        "policy__entropy": lambda step: 2.0**-step,
        "advantages__degenerate_groups": 0.9,
        "rollout__preemptions": 7.0,
    }
    found = keys(advise(metrics_of(**everything), GPU))
    assert len(found) == MOST < len(RULES)
    assert found[:2] == [LR, REWARDS]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("2026-11-21-algos-smollm2-on-h200/GRPO.csv", [ENTROPY, ALGORITHM, "model.batch.max_tokens_per_gpu"]),
        ("2026-11-21-algos-smollm2-on-h200/DAPO.csv", [DATA, "model.rollout", "model.batch.max_tokens_per_gpu"]),
        ("2026-11-21-core-on-h200/smollm2-1-gpu.csv", [DATA, "model.batch.max_tokens_per_gpu"]),
        ("2026-11-21-core-on-h200/quickstart-1-gpu.csv", [TOKENS, "model.batch.max_tokens_per_gpu"]),
        ("2026-11-23-titan-on-h200/titan-float8.csv", [ALGORITHM, "model.batch.max_tokens_per_gpu", PROMPTS]),
    ],
)
def test_runs_that_were_measured(tmp_path: Path, file: str, expected: list[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(lines_of((RESULTS / file).read_text()))
    assert keys(advise(read_metrics(tmp_path, []), GPU)) == expected


def test_every_key_and_page_exists() -> None:
    """Catches a link to a section that was renamed, and a key that no configuration has."""
    files = (ROOT / "plugins/watch/src/rlplug_watch").glob("*advice.py")
    source = "".join(file.read_text() for file in files)
    pages = set(re.findall(r'^ +"([a-z-]+\.md(?:#[a-z-]+)?)",$', source, re.M))
    assert len(pages) > 5
    for page in pages:
        file, _, anchor = page.partition("#")
        titles = re.findall(r"^#+ (.+)$", (ROOT / "docs" / file).read_text(), re.M)
        anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, page
    reference = (ROOT / "docs/configuration.md").read_text()
    for key in set(re.findall(r'^ +"((?:model|data|trainer)\.[a-z_.]+)",$', source, re.M)):
        last = key.rpartition(".")[2]
        assert f"`{last}`" in reference or f"{key}" in reference or last in ("lr", "devices", "init_args"), key
