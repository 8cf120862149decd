"""Where a step's time went, and which options are named for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlplug_watch.levers import LEVERS, RESHARD, describe_shares, levers
from rlplug_watch.report.run_data import Metrics

ROOT = Path(__file__).parents[3]
GPU = {"device": "cuda:0", "gpu_gib": 80.0}
VLLM = {"model.rollout.class_path": "rlplug_rollout_vllm.VLLMRollout", "model.partial_rollout": "null"}
FAST = {"model.optimizations[0].class_path": "CompileBlocks", "model.optimizations[1].class_path": "FusedLogprobs"}
SHARDED = {**VLLM, **FAST, RESHARD: "true"}


def metrics_of(rollout: float = 6.0, update: float = 3.0, first: float = 1.0, **columns: float) -> Metrics:
    """Return eight steps; the first two take ``first`` times as long."""
    factors = [first, first, *[1.0] * 6]
    plain = {"time/step": 10.0, "time/rollout": rollout, "time/update": update, "memory/update": 72.0}
    plain |= {"completion/length_mean": 100.0, "completion/length_max": 300.0}
    plain |= {name.replace("__", "/"): value for name, value in columns.items()}
    scaled = {name: tuple(value * (f if "time" in name else 1.0) for f in factors) for name, value in plain.items()}
    return Metrics(tuple(range(1, 9)), scaled)


def test_the_first_steps_do_not_count():
    """It catches shares that compilation decides: here the first two steps take ten times as long."""
    metrics = metrics_of(first=10.0)
    assert describe_shares(metrics) == "a step took 10 s: rollout 60%, update 30%"
    assert describe_shares(Metrics((1, 2, 3), {"time/step": (1.0, 1.0, 1.0)})) is None


@pytest.mark.parametrize(
    ("config", "columns", "expected"),
    [
        (SHARDED | {RESHARD: "false"}, {}, []),
        (SHARDED, {}, []),  # 72 of 80 GiB: no room for gathered weights
        (SHARDED, {"memory__update": 40.0, "update": 5.0, "rollout": 4.0}, [RESHARD]),
        (SHARDED, {"memory__update": 40.0, "update": 0.2}, []),  # less than a hundredth of a step
        (VLLM, {}, ["model.optimizations"]),
        (VLLM | FAST, {"completion__length_max": 401.0}, ["model.partial_rollout"]),
        (FAST | {"model.rollout": "null"}, {}, ["model.rollout"]),
        (FAST | {"model.rollout": "null"}, {"rollout__running": 64.0}, []),
        (FAST | {"model.optimizations[2].class_path": "a.GradientCheckpointing"}, {}, []),
        (
            FAST | {"model.optimizations[2].class_path": "a.GradientCheckpointing"},
            {"memory__update": 30.0},
            ["model.optimizations"],
        ),
        (
            {"model.rollout": "null", "model.batch.share_prefixes": "false"},
            {},
            ["model.rollout", "model.optimizations"],
        ),
        ({}, {"memory__update": 10.0}, []),  # nothing is known of the run
    ],
)
def test_what_is_named(config, columns, expected):
    assert [advice.key for advice in levers(metrics_of(**columns), GPU, config)] == expected


def test_gains_are_of_the_step():
    (advice,) = levers(metrics_of(), GPU, VLLM)
    assert "The update took 30% of a step." in advice.text
    assert "saved 27% of it" in advice.text
    assert advice.text.endswith("which is 8% of a step here.")
    assert levers(metrics_of(), {"device": "cpu"}, VLLM) == []


def test_what_was_measured_is_there():
    for lever in LEVERS:
        assert (ROOT / "benchmarks" / "results" / lever.measured.rpartition(": ")[2] / "README.md").is_file()
        page, _, section = lever.page.partition("#")
        titles = [line.strip("# \n").lower().replace(" ", "-") for line in (ROOT / "docs" / page).open()]
        assert not section or section in titles, lever.page
